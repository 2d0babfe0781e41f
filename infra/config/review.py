"""The `review` section: which release the design review looks at, and what it holds against it."""

from pydantic import Field

from infra.config.base import Section


class ReviewConfig(Section):
    release: str = "champion"
    """Release that is reviewed: a number, `latest`, an alias, or a label such as `smol-release/3`."""
    max_sync_share: float = Field(0.1, gt=0, le=1)
    """Largest share of the time of a step that may go into publishing and moving weights."""
    max_idle_share: float = Field(0.2, gt=0, le=1)
    """Largest share of the devices' time in which neither engines nor trainer work."""
    long_tokens: int = Field(512, ge=1)
    """A run whose longest answer is shorter says nothing of long generations, tokens."""
    min_decode_share: float = Field(0.5, gt=0, le=1)
    """Smallest share of the requests' time in the engine that must be decoding, not waiting or prefilling."""
    max_kv_cache: float = Field(0.9, gt=0, le=1)
    """Largest share of the KV cache that may be in use at the peak."""
    min_drafts: int = Field(100, ge=1)
    """Drafts of each domain from which acceptance counts as measured."""
    max_age_days: float = Field(30.0, gt=0)
    """Runs that ended longer ago prove nothing of triggers and unattended loops, days."""
