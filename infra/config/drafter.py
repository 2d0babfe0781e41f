"""The `drafter` section: traffic, capture, training and acceptance of the speculative drafter."""

from typing import Literal

from pydantic import Field, model_validator

from infra.config.base import Section


class TrafficSource(Section):
    domain: str
    """Name in tables and plots: chat, code, maths, ..."""
    source: str
    """`writing`, `code`, `mmath`, `tools` (function calls), `own` (prompts that the target writes itself), `rl` (the RL
    environments' prompts), `rollouts` (the answers of the RL run that made the target: trained on, never measured),
    `production` (requests kept by `release.recording`), or the path of a JSONL file in OpenAI chat format."""
    prompts: int = Field(16, ge=1)
    """Prompts answered for training; of `rollouts` at most so many answers."""
    weight: float = Field(1.0, gt=0)
    """How often an answer of this domain is trained on in an epoch."""


class DrafterConfig(Section):
    kind: Literal["eagle3", "draft_model", "ngram"] = "eagle3"
    """Kind of drafter: an EAGLE-3 head on the target's hidden states, a small model distilled on its answers, or lookup
    of n-grams in the text, which is not trained. Each is measured alike; a target may have several."""
    traffic: list[TrafficSource] = Field(
        [
            TrafficSource(domain="chat", source="writing"),
            TrafficSource(domain="code", source="code"),
            TrafficSource(domain="maths", source="rl"),
            TrafficSource(domain="tools", source="tools"),
            TrafficSource(domain="rollouts", source="rollouts", prompts=64),
        ],
        min_length=1,
    )
    """What the drafter learns on; the target writes the answers."""
    max_prompt_tokens: int = Field(256, ge=8)
    """Prompts longer than this, chat template included, are passed over, and conversations end before them, tokens."""
    max_new_tokens: int = Field(96, ge=8)
    """Longest answer, tokens."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the answers, that of serving. Above 0 acceptance is measured at it too, beside at 0."""
    capture_budget_gib: float = Field(2.0, gt=0)
    """Hidden states kept on disk at once, GiB; capture stops before it would be exceeded."""
    stream: bool = False
    """Capture the states of each pack just before it is trained on and keep none but the held-out ones: capture waits
    for training when `capture_budget_gib` is full, and every epoch is captured again."""
    draft_vocab_size: int = Field(4096, ge=16)
    """Tokens the head can propose: the most frequent of the target's answers, then the lowest ids. The whole vocabulary
    where that is smaller."""
    num_layers: int = Field(1, ge=1)
    """Decoder layers of the head, or of the draft model."""
    overfit_check: bool = True
    """Before training, teach a head a single answer and serve it: a fault between capture, training and serving shows
    there, where the head should be accepted to the last token."""
    training_steps: int = Field(60, ge=0)
    """Optimizer steps, at most."""
    held_out_looks: int = Field(6, ge=1)
    """How often in `training_steps` acceptance on the held-out sequences is looked at; the best head seen is kept."""
    patience: int = Field(3, ge=0)
    """Training stops when so many looks in a row show no gain; 0 trains to the end."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between two checkpoints, from which an interrupted training goes on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the products in training; weights and optimizer stay float32."""
    attention: Literal["auto", "dense"] = "auto"
    """In training: `auto` takes flash kernels on GPUs in bfloat16, `dense` masked products there too."""
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
    """Share of each domain's captured sequences kept from training to watch acceptance."""
    warm_start: bool = True
    """Start from the drafter of an earlier target version when there is one."""
    num_speculative_tokens: int = Field(3, ge=1)
    """Proposed tokens per target pass when served."""
    eval_prompts: int = Field(8, ge=1)
    """Prompts per domain on which acceptance is measured; never trained on."""
    benchmarks: list[Literal["mt_bench", "humaneval", "gsm8k"]] = []
    """Question sets that acceptance is measured on as well, each a domain of its own, 80 questions of each."""
    eval_concurrency: int = Field(4, ge=1)
    """Requests in flight while acceptance and speed are measured."""
    load_concurrency: list[int] = []
    """Further numbers of requests in flight, each measured on the held-out prompts of all domains together, with the
    drafter and without: acceptance, latency, speedup and the best number of proposed tokens. Such as [1, 4, 16, 64]."""
    seed: int = 0
    """Seed of prompt choice, initial weights and order."""

    @model_validator(mode="after")
    def _check(self):
        domains = [*(t.domain for t in self.traffic), *self.benchmarks]
        if len(set(domains)) != len(domains):
            raise ValueError(
                f"traffic and benchmarks name a domain twice: {sorted(domains)}; give each source its own domain"
            )
        if min(self.load_concurrency, default=1) < 1:
            raise ValueError(f"load_concurrency has {min(self.load_concurrency)}: at least one request is in flight")
        if all(t.source == "rollouts" for t in self.traffic):
            raise ValueError("traffic has rollouts alone, on which nothing is measured: add a source of prompts")
        return self
