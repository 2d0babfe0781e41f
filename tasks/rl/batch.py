"""What the trainer is given: groups of scored answers with the engine's log-probs."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TrainingGroup:
    """Answers to one prompt.

    prompt_ids: int64 [P]. answers: int64 [A_i] each, end-of-sequence token included where there is one.
    logprobs: float64 [A_i] each, of the sampled tokens under the distribution they were sampled from, nats; not finite
    where the engine's was not. advantages: one per answer.
    own: bool [A_i] each, the tokens that the policy sampled; the others (what a user or a tool said between its turns)
    are read and not trained on. None: all of them.
    """

    prompt_ids: np.ndarray
    answers: list[np.ndarray]
    logprobs: list[np.ndarray]
    advantages: list[float]
    own: list[np.ndarray] | None = None


@dataclass(frozen=True)
class TrainingBatch:
    """All groups of one step.

    temperature: at which the answers were sampled. longest: the longest answer that was allowed, tokens (L_max).
    """

    groups: list[TrainingGroup]
    temperature: float
    longest: int

    @property
    def num_answers(self) -> int:
        return sum(len(group.answers) for group in self.groups)
