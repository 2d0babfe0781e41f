"""The prompts that drafters learn from, and those that drafters and quants are measured on."""

from infra.config.flows import DrafterFlowConfig, LoopConfig, QuantizeFlowConfig
from infra.config.quant import ROUND_TO_NEAREST
from infra.store.refs import ArtifactRef
from tasks.drafter.steps import gather_traffic
from tasks.drafter.traffic import Traffic
from tasks.rl.environments.conversations import conversations

RL_SOURCE = "rl"


def traffic(config: DrafterFlowConfig | QuantizeFlowConfig | LoopConfig, target: ArtifactRef) -> Traffic:
    """Traffic of `config.drafter` in the chat template of `target`; the source `rl` is the RL environments' prompts.

    The same for every flow of one configuration, and gathered once.
    """
    wanted = [
        source.prompts + config.drafter.eval_prompts for source in config.drafter.traffic if source.source == RL_SOURCE
    ]
    given = {RL_SOURCE: conversations(config.rl, sum(wanted))} if wanted else {}
    return gather_traffic(config.drafter, given, target)


def calibration(config: QuantizeFlowConfig, target: ArtifactRef) -> list[list[int]]:
    """Token ids of what the recipe of `config.quantize` is calibrated on; none where it needs no texts."""
    if config.quantize.recipe == ROUND_TO_NEAREST:
        return []
    return traffic(config, target).train_ids(config.quantize.calibration_texts)
