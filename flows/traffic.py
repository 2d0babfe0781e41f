"""The prompts that drafters learn from, and those that drafters and quants are measured on."""

from infra.config.flows import DrafterFlowConfig, LoopConfig, QuantizeFlowConfig
from infra.config.quant import ROUND_TO_NEAREST
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.drafter.gathering import gather_traffic, write_prompts
from tasks.drafter.sources import OWN, RL
from tasks.drafter.sources.base import Conversation
from tasks.drafter.traffic import Traffic
from tasks.evaluate.problems import Problem
from tasks.rl import examining
from tasks.rl.environments.conversations import conversations


def traffic(config: DrafterFlowConfig | QuantizeFlowConfig | LoopConfig, target: ArtifactRef) -> Traffic:
    """Traffic of `config.drafter` in the chat template of `target`, with what other rooms and the target itself give:
    the RL environments' prompts (source `rl`) and prompts that the target writes (`own`).

    The same for every flow of one configuration, and gathered once.
    """
    wanted: dict[str, int] = {}
    for source in config.drafter.traffic:
        wanted[source.source] = wanted.get(source.source, 0) + source.prompts + config.drafter.eval_prompts
    given = {}
    if RL in wanted:
        given[RL] = [Conversation(messages=messages) for messages in conversations(config.rl, wanted[RL])]
    if OWN in wanted:
        given[OWN] = write_prompts(target, wanted[OWN], config.drafter, config.engine, config.cluster)
    return gather_traffic(config.drafter, given, target)


def calibration(config: QuantizeFlowConfig, target: ArtifactRef) -> list[list[int]]:
    """Token ids of what the recipe of `config.quantize` is calibrated on; none where it needs no texts."""
    if config.quantize.recipe == ROUND_TO_NEAREST:
        return []
    return traffic(config, target).train_ids(config.quantize.calibration_texts)


def held_out_problems(config: QuantizeFlowConfig, target: ArtifactRef) -> list[Problem]:
    """The RL environments' held-out problems on which base and quant are compared."""
    count, room = config.quantize.held_out_problems, config.engine.max_model_len
    return examining.held_out_problems(config.rl, count, open_store().open(target), room)
