"""Configuration of the demo flow; imports no Prefect, whose environment the command line sets first."""

from infra.config.base import Section
from infra.config.target import TargetConfig


class DemoConfig(Section):
    target: TargetConfig = TargetConfig(name="demo")
    folder: str
    """Files in it decide how the flow goes: it waits at `gate` (a FIFO), for a person if `ask` exists, ends badly if
    `refuse` or `fail` does."""
