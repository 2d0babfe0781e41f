"""What was begun and what has finished, on disk as it happens: a killed run finds every finished group again."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.rl.environments.base import Problem
from tasks.rl.rollout import Group, Rollout

_NAME = re.compile(r"round-(\d{6})\.jsonl")


@dataclass
class Round:
    """One round as it is on disk. problems: (environment, index) by place. groups: those that finished, by place.
    cursor: the data cursor after its last problem was taken."""

    problems: dict[int, tuple[str, int]] = field(default_factory=dict)
    groups: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    cursor: dict[str, dict[str, int]] | None = None


class Journal:
    """One file a round in `folder`. Lines are whole or not there: a torn last one is not read."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, number: int, problems: Sequence[tuple[int, Problem]], cursor: dict[str, dict[str, int]]) -> None:
        """Note the problems, by place, that are sampled now, and where the data cursor then stands."""
        line = {"begun": [[place, problem.environment, problem.index] for place, problem in problems]}
        self._append(number, line | {"cursor": cursor})

    def finish(self, number: int, place: int, group: Group) -> None:
        """Keep a group that is sampled and scored."""
        rollouts = [{name: value for name, value in vars(r).items() if name != "problem"} for r in group.rollouts]
        self._append(number, {"place": place, "rollouts": rollouts})

    def rounds(self) -> list[int]:
        """Numbers of the rounds it knows, in order."""
        return sorted(int(found[1]) for path in self._folder.iterdir() if (found := _NAME.fullmatch(path.name)))

    def read(self, number: int) -> Round:
        """What is known of a round; nothing, for one that never began."""
        path, known = self._path(number), Round()
        for line in path.read_text().splitlines() if path.is_file() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the process was killed while it wrote this line
                continue
            if "begun" in entry:
                known.problems |= {place: (environment, index) for place, environment, index in entry["begun"]}
                known.cursor = entry["cursor"]
            else:
                known.groups[entry["place"]] = entry["rollouts"]
        return known

    def forget(self, before: int) -> None:
        """Delete the rounds before number `before`."""
        for number in self.rounds():
            if number < before:
                self._path(number).unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"round-{number:06d}.jsonl"

    def _append(self, number: int, entry: dict[str, Any]) -> None:
        with self._path(number).open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            torn = size and file.seek(size - 1) is not None and file.read(1) != b"\n"
            file.write((b"\n" if torn else b"") + json.dumps(entry).encode() + b"\n")


def restored(problem: Problem, rollouts: Sequence[dict[str, Any]]) -> Group:
    """A group as `Journal.finish` kept it."""
    return Group(
        problem,
        [
            Rollout(problem, **rollout | {"versions": [tuple(span) for span in rollout["versions"]]})
            for rollout in rollouts
        ],
    )
