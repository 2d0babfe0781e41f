"""The `drafter` section: traffic, capture, training and acceptance of the speculative drafter."""

from typing import Literal

from pydantic import Field, model_validator

from infra.config.base import Section


class TrafficSource(Section):
    domain: str
    """Name in tables and plots: chat, code, maths, ..."""
    source: str
    """A name of `tasks/drafter/traffic.py` (`writing`, `code`, `mmath`), `rl` for the RL environments' prompts, or the
    path of a JSONL file in OpenAI chat format."""
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
    max_prompt_tokens: int = Field(256, ge=8)
    """Prompts longer than this, chat template included, are passed over, tokens."""
    max_new_tokens: int = Field(96, ge=8)
    """Longest answer, tokens."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the answers, that of serving."""
    capture_budget_gib: float = Field(2.0, gt=0)
    """Hidden states kept on disk at once, GiB; capture stops before it would be exceeded."""
    draft_vocab_size: int = Field(4096, ge=16)
    """Tokens the head can propose: the most frequent of the target's answers, then the lowest ids. The whole vocabulary
    where that is smaller."""
    num_layers: int = Field(1, ge=1)
    """Decoder layers of the head."""
    training_steps: int = Field(60, ge=0)
    """Optimizer steps."""
    micro_batch_tokens: int = Field(512, ge=32)
    """Tokens of one step (packed sequences); a longer sequence is cut."""
    ttt_steps: int = Field(3, ge=1)
    """Training-time-test steps."""
    ttt_decay: float = Field(0.8, gt=0, le=1)
    """Weight of training-time-test step j is this to the power j."""
    loss: Literal["kl_div", "ce", "tv", "lk_hybrid"] = "kl_div"
    """Loss of one training-time-test step, by its name in speculators."""
    lr: float = Field(2e-3, gt=0)
    """Peak learning rate of AdamW."""
    warmup_share: float = Field(0.1, ge=0, lt=1)
    """Share of the steps in which the learning rate rises linearly; then it falls to a tenth along a cosine."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
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
