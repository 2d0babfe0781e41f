"""What trainers may ask vLLM's workers beside its own weight-transfer calls (`--worker-extension-cls`)."""

from typing import Any


class TransferCalls:
    """Mixed into vLLM's worker class; called over `/collective_rpc`. Answers are plain data."""

    def weight_transfer_status(self) -> dict[str, Any]:
        """`Receiver.status`."""
        return self.weight_transfer_engine.status()

    def weight_checksums(self) -> dict[str, dict[str, str]]:
        """`Receiver.checksums`."""
        return self.weight_transfer_engine.checksums()

    def abandon_weight_update(self) -> dict[str, Any]:
        """Give up the update on its way, so that another may start; the status after it."""
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False
        return self.weight_transfer_engine.status()
