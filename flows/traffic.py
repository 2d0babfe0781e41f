"""The prompts that drafters learn from, and those that drafters and quants are measured on."""

from infra.config.flows import DrafterFlowConfig, LoopConfig, QuantizeFlowConfig
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
