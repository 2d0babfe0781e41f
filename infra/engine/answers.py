"""What an engine answers."""

from dataclasses import dataclass, field
from pathlib import Path

_OWN_WEIGHTS = "default"  # vLLM's name for those that it has read itself


def numbered(weights: str) -> int:
    """The version that an engine calls `weights`, as a number: 0 until it is sent others than it started with."""
    return 0 if weights == _OWN_WEIGHTS else int(weights)


@dataclass(frozen=True)
class Generation:
    """Tokens of one request.

    prompt_ids, token_ids: the prompt and what was generated.
    logprobs: natural log-probs of `token_ids`, in nats; -inf where the engine's was not finite. A rollout engine gives
        those of the distribution that was sampled from (after temperature, top_k, top_p), other roles the model's own.
        Empty where they were not asked for.
    finish_reason: `stop` (end of sequence), `length` or `abort`.
    weight_versions: (version, start, end): tokens [start, end) were sampled by the weights of that version. Empty
        without RL endpoints.
    hidden_states_path: where a capture engine writes this request's hidden states (`infra.engine.captures`).
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    weight_versions: list[tuple[str, int, int]] = field(default_factory=list)
    hidden_states_path: Path | None = None


@dataclass(frozen=True)
class ScoredToken:
    """One position of a text under the model.

    logprob: natural log-prob of `token_id` given all before it.
    top: token id to log-prob of the most likely tokens; may hold `token_id` beside the top-k.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class ChatAnswer:
    """An answer of the chat endpoint, with the tokens it consists of."""

    text: str
    finish_reason: str
    prompt_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class SpeculationCounters:
    """Totals since the engine started.

    drafts: passes of the target that had proposals. accepted_per_position[i]: drafts whose token i was accepted.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    def since(self, earlier: "SpeculationCounters") -> "SpeculationCounters":
        """What was counted after `earlier`."""
        before = earlier.accepted_per_position or (0,) * len(self.accepted_per_position)
        per_position = tuple(now - then for now, then in zip(self.accepted_per_position, before, strict=True))
        return SpeculationCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            per_position,
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target pass, bonus token included: 1 + accepted/drafts; NaN without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else float("nan")

    @property
    def acceptance_rates(self) -> list[float]:
        """Unconditional acceptance rate of each position: accepted at i / drafts; NaN without drafts."""
        return [n / self.drafts if self.drafts else float("nan") for n in self.accepted_per_position]
