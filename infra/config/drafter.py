"""The `drafter` section: traffic, capture, training and acceptance of the speculative drafter."""

from typing import Literal

from pydantic import Field, model_validator

from infra.config.base import Section


class TrafficSource(Section):
    domain: str
    """Name in tables and plots: chat, code, maths, ..."""
    source: str
    """`mmath`, `writing`, `humaneval-like` and the other names of `tasks/drafter/traffic.py`, `rl` for the RL
    environments' prompts, or the path of a JSONL file in OpenAI chat format."""
    prompts: int = Field(16, ge=1)
    """Prompts answered for training."""


class DrafterConfig(Section):
    kind: Literal["eagle3"] = "eagle3"
    """Kind of drafter."""
    traffic: list[TrafficSource] = Field(
        [
            TrafficSource(domain="chat", source="writing"),
            TrafficSource(domain="code", source="code"),
            TrafficSource(domain="maths", source="rl"),
        ],
        min_length=1,
    )
    """What the drafter learns on; the target writes the answers."""
    max_new_tokens: int = Field(96, ge=2)
    """Longest answer, tokens."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the answers, that of serving."""
    capture_budget_gib: float = Field(2.0, gt=0)
    """Hidden states kept on disk at once, GiB; capture stops before it would be exceeded."""
    draft_vocab_size: int = Field(8192, ge=16)
    """Tokens the head can propose: the most frequent of the target's answers."""
    num_layers: int = Field(1, ge=1)
    """Decoder layers of the head."""
    training_steps: int = Field(60, ge=0)
    """Optimizer steps."""
    micro_batch_tokens: int = Field(1024, ge=32)
    """Tokens of one step (packed sequences)."""
    ttt_steps: int = Field(3, ge=1)
    """Training-time-test steps."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate of AdamW."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the captured sequences kept from training to watch acceptance."""
    warm_start: bool = True
    """Start from the drafter of an earlier target version when there is one."""
    num_speculative_tokens: int = Field(3, ge=1)
    """Proposed tokens per target pass when served."""
    eval_prompts: int = Field(8, ge=1)
    """Prompts per domain on which acceptance is measured; never trained on."""
    eval_concurrency: int = Field(4, ge=1)
    """Requests in flight while acceptance and speed are measured."""
    seed: int = 0
    """Seed of prompt choice, initial weights and order."""

    @model_validator(mode="after")
    def _check(self):
        domains = [t.domain for t in self.traffic]
        if len(set(domains)) != len(domains):
            raise ValueError(f"traffic names a domain twice: {sorted(domains)}; give each source its own domain")
        return self
