"""The `release.recording` section: which requests serve engines keep as traffic for drafters."""

from pydantic import Field

from infra.config.base import Section


class RecordingConfig(Section):
    share: float = Field(0.0, ge=0, le=1)
    """Share of the chat requests that is kept, messages and tools alone; 0 keeps none."""
    per_minute: int = Field(60, ge=1)
    """Most requests that one engine keeps in a minute."""
    redact: str = ""
    """`module:function` that is given each request (`messages`, `tools`) and returns what may be kept of it, or None to
    keep nothing. Imported by the engine when it starts."""
    retention_days: float = Field(30.0, gt=0)
    """Days after which kept requests are removed."""
    budget_mib: int = Field(256, ge=1)
    """Kept requests on disk, MiB; nothing more is kept when they are full."""
