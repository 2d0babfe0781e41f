"""The `release.fleet.kubernetes` section: what `lockstep serve --render` assumes of a cluster."""

from typing import Annotated

from pydantic import Field

from infra.config.base import Section

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?$")]
"""A name of Kubernetes' (RFC 1123), with room for a number behind it."""


class KubernetesConfig(Section):
    namespace: Name = "lockstep"
    """Namespace of everything that is rendered."""
    image: str = "lockstep:gpu"
    """Container image in which Lockstep and its vLLM are installed."""
    claim: Name = "lockstep-store"
    """PersistentVolumeClaim that holds the store, the folder that LOCKSTEP_STORE names here. It is only read."""
    secret_name: Name = "lockstep-serve"
    """Secret whose entry `key` opens the engines: clients send it as their API key."""
    gateway: Name = "lockstep"
    """Gateway, of the Gateway API, that the route joins."""
    hostnames: list[str] = []
    """Hosts that the route answers for; all of the gateway's when empty."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource that stands for a GPU; a replica asks for `engine.tensor_parallel` of them. Empty: engines on CPU."""
    memory: str = Field("32Gi", pattern=r"^[0-9]+[KMGT]i$")
    """Memory of a replica, its shared memory included."""
