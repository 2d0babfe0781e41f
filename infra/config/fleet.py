"""The `release.fleet` section: how what is released is served, and how a new release takes over."""

from typing import Literal

from pydantic import Field, model_validator

from infra.config.base import Section
from infra.config.kubernetes import KubernetesConfig


class FleetConfig(Section):
    host: Literal["127.0.0.1", "0.0.0.0"] = "127.0.0.1"
    """Who reaches the fleet: this machine alone, or everyone who sends the key that LOCKSTEP_SERVE_KEY holds."""
    port: int = Field(8000, ge=1, le=65535)
    """Its port: the same through every release. `lockstep serve` takes the next free one where it is in use."""
    replicas: int = Field(1, ge=1)
    """Engines that serve a release. While another takes over there are as many of each: on GPUs, where not all of them
    can have one of their own, they share, and `engine.gpu_memory_fraction` must leave room for all."""
    retries: int = Field(6, ge=0)
    """Times a request without a first byte is tried again when its replica fails. A request that kills its engine
    kills as many."""
    drain_s: float = Field(600.0, ge=0)
    """Longest wait for the last answers of a replica that is taken out; then it is stopped, seconds."""
    silent_s: float = Field(60.0, gt=0)
    """A replica that does not answer for this long is replaced, seconds."""
    steps: list[int] = [10, 50]
    """Shares of the requests that a new release gets, one after the other, before it gets all, percent."""
    probes: int = Field(16, ge=0)
    """Requests of Lockstep's own at each step, to the new release and to the champion alike, so that there is
    something to compare without traffic."""
    hold_s: float = Field(10.0, ge=0)
    """How long each step lets clients' requests arrive before it is judged, seconds."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """What `lockstep serve --render` assumes of a cluster."""

    @model_validator(mode="after")
    def _check(self):
        if any(not 0 < share < 100 for share in self.steps) or sorted(set(self.steps)) != self.steps:
            raise ValueError(f"steps={self.steps}: give rising shares between 0 and 100 percent, such as [10, 50]")
        return self
