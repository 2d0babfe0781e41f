"""What `lockstep measure` measures: one file each, in the room of what it measures, and what it hands back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from infra.config.base import Section
from infra.config.flows import FlowConfig


class MeasureError(RuntimeError):
    """A measurement that cannot be made here. The message says what is needed and what there is."""


@dataclass(frozen=True)
class Line:
    """One curve of a picture: points (x, y) in the picture's units.

    beside: the name of the curve that it is to be compared with, whose colour it takes, dashed.
    """

    name: str
    points: Sequence[tuple[float, float]]
    beside: str = ""


@dataclass(frozen=True)
class Picture:
    """A chart of the measurement. log_x, log_y: decades instead of a linear axis."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Measured:
    """What a measurement found.

    rows: evidence, made by `tasks.evaluate.evidence.row`.
    table: one dictionary a line for people, columns named with their unit; all have the same keys.
    findings: whole sentences with the figures that answer what was asked.
    pictures: charts of the same figures.
    """

    rows: list[dict[str, Any]]
    table: list[dict[str, str | float | int | None]]
    findings: list[str]
    pictures: list[Picture] = field(default_factory=list)


class Measurement(Protocol):
    """One WHAT of `lockstep measure WHAT`.

    help: one sentence for the command's help.
    config: the flow configuration whose sections it reads (`--preset`, `--config`, `--set`).
    options: its own settings; each field is an option of the command.
    """

    help: str
    config: type[FlowConfig]
    options: type[Section]

    def measure(self, config: Any, options: Any, say: Callable[[str], None]) -> Measured:
        """Measure on this machine, now; `say` takes lines about what is being done.

        Raises MeasureError when it cannot be measured here.
        """
        ...
