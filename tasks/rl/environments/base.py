"""What an environment is: numbered problems, and a score for an answer to one of them."""

from dataclasses import dataclass
from typing import Protocol

Message = dict[str, str]


class BadEnvironment(ValueError):
    """An environment that cannot be used: unknown generator, bad parameters, missing file or scorer."""


@dataclass(frozen=True)
class Problem:
    """environment: the environment's label. index: number of the problem in it. messages: the conversation that asks.
    expected: a correct answer for tables, empty where the environment names none."""

    environment: str
    index: int
    messages: tuple[Message, ...]
    expected: str = ""

    @property
    def question(self) -> str:
        """What the last message asks: what makes two problems the same."""
        return self.messages[-1]["content"]


class Environment(Protocol):
    """Problems are reproducible: the same number is the same problem in every process.

    One that is no `Scored` is played: its rewards come with its episodes (`tasks.rl.playing`).
    """

    label: str
    """Name in tables and plots."""
    size: int | None
    """Number of problems; None when they never end."""

    def problem(self, index: int) -> Problem:
        """Problem number `index`, from 0."""
        ...


class Scored(Environment, Protocol):
    """An environment whose problems are answered in one turn."""

    def score(self, index: int, answer: str) -> float:
        """Reward of `answer`, in [0, 1]. May raise or hang: it runs in a process of its own with a time limit."""
        ...
