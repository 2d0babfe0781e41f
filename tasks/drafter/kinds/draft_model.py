"""A small language model, distilled on the target's answers."""

from infra.config.flows import DrafterFlowConfig
from infra.lineage.versions import Version
from tasks.drafter.kinds.base import Made
from tasks.drafter.steps import Answers
from tasks.drafter.training import train_draft_model, trainer


def make(target: Version, previous: Version | None, answers: Answers, config: DrafterFlowConfig, run: str) -> Made:
    """Distil some layers of the target, or the previous draft model, on the answers."""
    with trainer(config):
        trained = train_draft_model(target.artifact, answers.train, previous and previous.artifact, config)
    return Made(drafter=trained.head, result=trained.result, spans=trained.spans)
