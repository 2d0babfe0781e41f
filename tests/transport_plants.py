"""Faults that tests plant into an engine's worker (`--worker-extension-cls=tests.transport_plants.StaleHead`)."""

from typing import Any

from infra.transport.worker import TransferCalls


class StaleHead(TransferCalls):
    """Can put the head's kernel of an earlier version back, when checksums are asked for and no update can notice."""

    def keep_head(self) -> None:
        self._kept = self._head().cpu_linear
        self._planted = False

    def plant_kept_head(self, planted: str) -> None:
        self._planted = planted == "yes"

    def weight_checksums(self, model: str = "target") -> dict[str, dict[str, str]]:
        if getattr(self, "_planted", False):
            self._head().cpu_linear = self._kept
        return super().weight_checksums(model)

    def _head(self) -> Any:
        return self.model_runner.get_model().lm_head
