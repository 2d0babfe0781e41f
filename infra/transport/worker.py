"""What trainers may ask vLLM's workers beside its own weight-transfer calls (`--worker-extension-cls`)."""

from typing import Any


class TransferCalls:
    """Mixed into vLLM's worker class; called over `/collective_rpc`. Answers are plain data."""

    def weight_transfer_status(self) -> dict[str, Any]:
        """`Receiver.status`, and whether there is a drafter whose weights can be updated."""
        return self.weight_transfer_engine.status() | {"has_drafter": self.supports_draft_weight_updates()}

    def weight_checksums(self, model: str = "target") -> dict[str, dict[str, str]]:
        """`Receiver.checksums` of the `target` or the `drafter`."""
        return self.weight_transfer_engine.checksums(self.get_draft_model() if model == "drafter" else self.get_model())

    def rest_weight_transfer(self) -> dict[str, Any]:
        """Give back the memory that is kept for the next update; the status after it."""
        self.weight_transfer_engine.rest()
        return self.weight_transfer_engine.status()

    def abandon_weight_update(self) -> dict[str, Any]:
        """Give up the update on its way, so that another may start; the status after it."""
        self.weight_transfer_engine.abandon()
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False
        return self.weight_transfer_engine.status()
