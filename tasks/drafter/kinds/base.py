"""What a kind of drafter is."""

from typing import Protocol

from pydantic import BaseModel

from infra.config.flows import DrafterFlowConfig
from infra.lineage.versions import Version
from infra.store.refs import ArtifactRef
from tasks.drafter.steps import Answers
from tasks.drafter.worker import TrainingResult


class Made(BaseModel):
    """A drafter and how it came to be.

    drafter: its folder. result: of training, where there was some.
    states: captured hidden states, where it needed some, of `captured_tokens` tokens.
    """

    drafter: ArtifactRef
    result: TrainingResult | None = None
    states: ArtifactRef | None = None
    captured_tokens: int = 0
    spans: dict[str, float] = {}


class Kind(Protocol):
    """A module with this function."""

    def make(
        self, target: Version, previous: Version | None, answers: Answers, config: DrafterFlowConfig, run: str
    ) -> Made:
        """A drafter of this kind for `target`, from what the target answered.

        previous: of the same kind, to start from. run: key of the run, for what must not be shared between runs.
        """
