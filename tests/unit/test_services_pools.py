"""Which tasks wait for which GPUs."""

import importlib

import pytest

from infra.services import pools

DRAFTER = ("tasks.drafter.gathering", "tasks.drafter.steps", "tasks.drafter.training", "tasks.drafter.watch")
STEPS = ("tasks.rl.steps", *DRAFTER, "tasks.quant.steps", "tasks.release.steps")


@pytest.mark.parametrize(
    ("gpus", "limits"),
    [(0, {}), (1, {"lockstep-gpu": 1}), (2, {"lockstep-engines": 1, "lockstep-trainer": 1})],
)
def test_one_gpu_is_one_pool_and_several_are_two(gpus, limits):
    assert pools.limits(gpus) == limits


def test_what_starts_an_engine_or_a_trainer_is_held_back_by_its_pool():
    from prefect import Task

    tagged = {}
    for module in map(importlib.import_module, STEPS):
        tagged |= {found.name: found.tags for found in vars(module).values() if isinstance(found, Task)}
    both = pools.tags("engines", "trainer")
    assert tagged["train the policy"] == both == {"lockstep-gpu", "lockstep-engines", "lockstep-trainer"}
    assert tagged["train head"] == pools.tags("trainer")
    assert {name for name, held in tagged.items() if "lockstep-engines" in held} >= {
        "train the policy",
        "answer prompts",
        "capture hidden states",
        "measure drafter",
        "measure target",
        "look at base",
        "look at quant",
        "try drafter on quant",
        "serve and ask",
    }
    assert not tagged["judge by the gates"]
