"""EAGLE-3: a head of one layer that reads the target's hidden states and proposes token after token."""

from infra.config.flows import DrafterFlowConfig
from infra.lineage.versions import Version
from tasks.drafter.kinds.base import Made
from tasks.drafter.steps import Answers, capture_states, kept_when_streaming
from tasks.drafter.text import total
from tasks.drafter.training import overfit_one, train_head, train_head_streaming, trainer


def make(target: Version, previous: Version | None, answers: Answers, config: DrafterFlowConfig, run: str) -> Made:
    """Capture the states of the answers, check the way to serving on one of them, and train on all."""
    start, settings = previous and previous.artifact, config.drafter
    kept = kept_when_streaming(answers, settings) if settings.stream else answers.train
    with trainer(config):
        states = capture_states(target.artifact, kept, config, run)
        spans = [states.spans]
        if settings.overfit_check:
            spans.append(overfit_one(target.artifact, states.artifact, answers.sample, config).spans)
        if settings.stream:
            trained = train_head_streaming(target.artifact, states.artifact, answers.train, start, config, run)
        else:
            trained = train_head(target.artifact, states.artifact, start, config)
    return Made(
        drafter=trained.head,
        result=trained.result,
        states=states.artifact,
        captured_tokens=states.tokens,
        spans=total(*spans, trained.spans),
    )
