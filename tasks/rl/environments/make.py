"""Environments by the type their configuration names."""

from collections.abc import Sequence

from infra.config import rl as settings
from tasks.rl.environments.base import Environment
from tasks.rl.environments.generated import Generated
from tasks.rl.environments.jsonl import Jsonl
from tasks.rl.environments.played import Verifiers

KINDS = {"reasoning_gym": Generated, "jsonl": Jsonl, "verifiers": Verifiers}


def make(configs: Sequence[settings.Environment], seed: int) -> dict[str, Environment]:
    """The environments of `configs` by label.

    seed: decides what the generators generate. Raises BadEnvironment for one that cannot be used.
    """
    return {config.title: KINDS[config.type](config, seed) for config in configs}
