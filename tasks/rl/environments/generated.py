"""Problems of reasoning-gym's seeded generators."""

import difflib
import re
from functools import lru_cache

from infra.config.rl import ReasoningGym
from tasks.rl.environments.base import BadEnvironment, Problem

CHUNK = 500
"""Problems of one generator object; the next chunk continues its seeds, so that generators of finite size never end."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def tagged(answer: str) -> str:
    """The last `<answer>...</answer>`, or the whole answer without such a tag."""
    found = _TAG.findall(answer)
    return (found[-1] if found else answer).strip()


def last_number(answer: str) -> str:
    """The last number, thousands separators left out; empty where there is none."""
    found = _NUMBER.findall(answer.replace(",", ""))
    return found[-1] if found else ""


EXTRACT = {"tagged": tagged, "last_number": last_number}


class Generated:
    """One generator with its parameters.

    Raises BadEnvironment for a generator or parameter that reasoning-gym does not have.
    """

    size = None

    def __init__(self, config: ReasoningGym, seed: int):
        from reasoning_gym.factory import DATASETS

        self.label, self._extract = config.title, EXTRACT[config.extract]
        self._name, self._params, self._seed = config.name, config.params, seed
        if config.name not in DATASETS:
            near = difflib.get_close_matches(config.name, DATASETS, n=3)
            raise BadEnvironment(
                f"reasoning-gym has no generator {config.name!r}"
                + (f": did you mean {', '.join(near)}?" if near else "")
            )
        self._chunk = lru_cache(maxsize=4)(self._make_chunk)
        try:
            self._chunk(0)
        except (TypeError, ValueError, AssertionError) as error:
            raise BadEnvironment(f"reasoning-gym {config.name} refuses params {config.params}: {error}") from error

    def _make_chunk(self, number: int):
        from reasoning_gym import create_dataset

        seed = (self._seed + number * CHUNK) % 2**31
        return create_dataset(self._name, **self._params, seed=seed, size=CHUNK)

    def _entry(self, index: int) -> dict:
        return self._chunk(index // CHUNK)[index % CHUNK]

    def problem(self, index: int) -> Problem:
        """Problem number `index`."""
        entry = self._entry(index)
        return Problem(self.label, index, ({"role": "user", "content": entry["question"]},), str(entry["answer"]))

    def score(self, index: int, answer: str) -> float:
        """The generator's own score of what is extracted from the answer."""
        return float(self._chunk(index // CHUNK).score_answer(self._extract(answer), self._entry(index)))
