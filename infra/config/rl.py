"""The `rl` section: reinforcement learning on verifiable rewards."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from infra.config.base import Section


class ReasoningGym(Section):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Seeded generators of the reasoning-gym package."""
    name: str
    """Generator, such as `chain_sum`."""
    params: dict[str, Any] = {}
    """The generator's own parameters."""
    label: str = ""
    """Name in tables and plots; empty takes the generator's."""
    extract: Literal["tagged", "last_number"] = "tagged"
    """What of an answer is scored: the last `<answer>...</answer>` (all of it without one), or its last number."""
    weight: float = Field(1.0, gt=0)
    """Share of the prompts, relative to the other environments."""

    @property
    def title(self) -> str:
        """Name in tables and plots."""
        return self.label or self.name

    @property
    def scorer(self) -> str:
        """What scores, for messages."""
        return f"reasoning_gym:{self.name}"


class JsonlEnvironment(Section):
    type: Literal["jsonl"] = "jsonl"
    """A JSONL file of `{"prompt": ..., "answer": ...}` and a scorer of your own."""
    label: str = "jsonl"
    """Name in tables and plots."""
    path: str
    """The file. `prompt` is a string or a list of chat messages; the whole line is given to the scorer."""
    scorer: str = Field(pattern=r"^[\w.]+:\w+$")
    """`module:function`, called as function(answer: str, line: dict) -> float in [0, 1]."""
    weight: float = Field(1.0, gt=0)
    """Share of the prompts, relative to the other environments."""

    @property
    def title(self) -> str:
        """Name in tables and plots."""
        return self.label


class VerifiersEnvironment(Section):
    type: Literal["verifiers"] = "verifiers"
    """An environment of the verifiers package: episodes of several turns, with tools."""
    taskset: str
    """The installed taskset, as in verifiers' `--env.taskset.id`: the name of its module."""
    params: dict[str, Any] = {}
    """The taskset's own settings (`--env.taskset.*`)."""
    environment: str = ""
    """verifiers' environment round it (`--env.id`), such as `user-sim`; empty takes the taskset's own, or one agent."""
    env: dict[str, Any] = {}
    """Further settings of the environment (`--env.*`), such as `{"agent": {"harness": {"id": "bash"}}}`."""
    max_turns: int | None = Field(None, ge=1)
    """Turns of an agent; none leaves it to the environment."""
    label: str = ""
    """Name in tables and plots; empty takes the taskset's."""
    weight: float = Field(1.0, gt=0)
    """Share of the prompts, relative to the other environments."""

    @property
    def title(self) -> str:
        """Name in tables and plots."""
        return self.label or self.taskset


_TWO_TERMS_OF_ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

Environment = Annotated[ReasoningGym | JsonlEnvironment | VerifiersEnvironment, Field(discriminator="type")]


USUAL_MISMATCH = {"float32": {"k3": 1e-3, "mean_abs": 2e-2}, "bfloat16": {"k3": 5e-3, "mean_abs": 8e-2}}
"""What warns unless set, by the coarsest type that computes. Healthy in bfloat16: mean |D| of 0.011 (dense) to 0.019 as
published; 0.03 to 0.05, and k3 of 1e-3 to 2.6e-3, for SmolLM2-135M on an H200. In float32: mean |D| of 7e-6 on CPU."""


class MismatchBounds(Section):
    """Bounds on the mismatch between the engine's log-probs and the trainer's (definitions: `tasks/rl/mismatch.py`).

    A step past a bound that warns is marked, one past a bound that stops ends the run before its update; none judges
    nothing. With `max_staleness` above 0 the figures hold what the policy moved since a token was sampled: the bounds
    must allow that.
    """

    warn_k3: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Highest k3, nats per token. auto: 5e-3 where engine or trainer compute in bfloat16, else 1e-3."""
    stop_k3: float = Field(1e-1, gt=0)
    """Highest k3, nats per token."""
    warn_mean_abs: Literal["auto"] | Annotated[float, Field(gt=0)] | None = "auto"
    """Highest mean |D|, nats. auto: 8e-2 where engine or trainer compute in bfloat16, else 2e-2."""
    stop_mean_abs: float | None = Field(None, gt=0)
    """Highest mean |D|, nats."""
    warn_max_ratio: float | None = Field(None, gt=1)
    """Highest ratio of a single token."""
    stop_max_ratio: float | None = Field(None, gt=1)
    """Highest ratio of a single token."""
    warn_ess: float | None = Field(0.9, gt=0, le=1)
    """Lowest effective sample size, as a share of the tokens."""
    stop_ess: float | None = Field(None, gt=0, le=1)
    """Lowest effective sample size, as a share of the tokens."""

    def warns(self, *dtypes: str) -> dict[str, float]:
        """Those that warn where engine and trainer compute in `dtypes`, by figure: the lowest of ess, the highest of
        the others. What is usual warns no later than what stops."""
        usual, stops = USUAL_MISMATCH["bfloat16" if "bfloat16" in dtypes else "float32"], self.stops()
        found = self._set("warn")
        return {n: min(usual[n], stops.get(n, usual[n])) if b == "auto" else b for n, b in found.items()}

    def stops(self) -> dict[str, float]:
        """Those that stop, by figure: the lowest of ess, the highest of the others."""
        return self._set("stop")

    def _set(self, kind: Literal["warn", "stop"]) -> dict[str, Any]:
        found = {name: getattr(self, f"{kind}_{name}") for name in ("k3", "mean_abs", "max_ratio", "ess")}
        return {name: bound for name, bound in found.items() if bound is not None}

    @model_validator(mode="after")
    def _check(self):
        warns, stops = self.warns(), self.stops()
        for name in warns.keys() & stops.keys():
            sign = -1 if name == "ess" else 1
            if sign * warns[name] > sign * stops[name]:
                raise ValueError(
                    f"mismatch.warn_{name} lies past mismatch.stop_{name}: a step must warn before it stops"
                )
        return self


class LoRA(Section):
    """Adapters that are trained in place of the weights; what is published and registered has them merged."""

    rank: int = Field(16, ge=1)
    """Rank of an adapter's product."""
    alpha: float = Field(32.0, gt=0)
    """An adapter's product is scaled by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter, by their name's ending; `all-linear` takes all but the output head."""


class RLConfig(Section):
    environments: list[Environment] = Field(
        [
            ReasoningGym(name=name, params=_TWO_TERMS_OF_ONE_DIGIT, extract="last_number")
            for name in ("products", "chain_sum")
        ],
        min_length=1,
    )
    """Where prompts and scores come from."""
    held_out_share: float = Field(0.2, gt=0, lt=1)
    """Share of the questions, chosen by a hash of question and seed, that are never trained on."""
    scorer_processes: int = Field(2, ge=1)
    """Processes that score answers."""
    scorer_timeout_s: float = Field(10.0, gt=0)
    """Limit of one score, seconds; a scorer that takes longer costs its rollout."""
    episode_timeout_s: float = Field(600.0, gt=0)
    """Limit of one episode of a verifiers environment, seconds; one that takes longer costs its rollout."""
    system_prompt: str | None = None
    """System message before every prompt; none uses the chat template's own."""
    steps: int = Field(2, ge=0)
    """Steps: rollouts, an update, and new weights in the engines."""
    prompts_per_step: int = Field(4, ge=1)
    """Groups of one step."""
    group_size: int = Field(8, ge=1)
    """Rollouts of one prompt."""
    oversampling: float = Field(1.0, ge=1)
    """Groups begun for a step, as a multiple of `prompts_per_step`; the step takes the first that are done."""
    filter_groups: bool = False
    """Leave out groups whose rewards are all equal, from which nothing is learned, and begin others in their place
    (dynamic sampling, DAPO)."""
    filter_limit: float = Field(3.0, ge=1)
    """Most groups begun for a step, as a multiple of `prompts_per_step`; after that it makes do with fewer."""
    stragglers: Literal["wait", "cut", "carry"] = "wait"
    """Groups that have not finished when a step has enough: wait for them, give them up, or carry them into the next
    step, where they go on under the next weights (needs `max_staleness` of 1 or more)."""
    overlong_buffer: int = Field(0, ge=0)
    """Last tokens before `max_new_tokens` over which an answer's reward falls linearly; 0 does not punish length."""
    overlong_penalty: float = Field(1.0, ge=0)
    """What an answer of `max_new_tokens` loses of its reward (soft overlong punishment, DAPO)."""
    max_new_tokens: int = Field(16, ge=1)
    """Longest answer, tokens; of an episode, over all turns of the agent."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts."""
    speculate: bool = False
    """Let the fastest drafter of the version that training starts from propose tokens. The distribution stays what it
    is; off by itself where no drafter was measured to be faster than plain decoding."""
    max_staleness: int = Field(0, ge=0)
    """Oldest policy, in steps behind the trainer, whose tokens may be trained on; 0 is synchronous."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How rewards of a group become advantages."""
    correction: Literal["none", "tis", "tis_sequence", "icepop", "mis_sequence"] = "tis"
    """Weights for the mismatch between engine and trainer."""
    correction_low: float = Field(0.5, gt=0)
    """Lower bound of the masked corrections."""
    correction_high: float = Field(2.0, gt=0)
    """Truncation (tis, tis_sequence) or upper bound (icepop, mis_sequence)."""
    loss: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "dapo"
    """Policy loss and its aggregation."""
    clip_low: float = Field(0.2, ge=0)
    """Lower clip range of the ratio."""
    clip_high: float = Field(0.28, ge=0)
    """Upper clip range of the ratio."""
    dual_clip: float = Field(3.0, gt=1)
    """Bound of the ratio where the advantage is negative (grpo, dapo, dr_grpo)."""
    updates_per_step: int = Field(1, ge=1)
    """AdamW updates on the rollouts of one step. The ratio is one in the first, so clipping acts from the second on."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the k3 penalty towards the starting model."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, steps."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    lora: LoRA | None = None
    """Train adapters; none trains every weight."""
    trainer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trainer's forward and backward pass. Weights, sums of gradients and moments are float32."""
    gradient_checkpointing: bool = False
    """Compute activations and logits again for the gradient instead of keeping them: less memory for more time."""
    numerics: Literal["fast", "matched"] = "fast"
    """matched: engine and trainer compute the output head in float32, and the engine's kernels, on GPUs, give a token
    the same log-prob in whatever batch it is computed. fast: each as it is fastest."""
    micro_batch_tokens: int = Field(2048, ge=16)
    """Tokens of one forward and backward pass. The prompt of a group is counted once, padding does not occur."""
    transport: Literal["shm", "ipc", "nccl", "store"] = "shm"
    """How weights reach the engines. shm: memory shared on one host; ipc: the trainer's own GPU memory, engines on the
    same GPU; nccl: broadcast to engines on other GPUs or hosts (gloo on CPU); store: files in `transport_folder`, which
    may be a bucket."""
    transport_folder: str | None = None
    """What trainer and engines share, for transport `store`: a folder, or `s3://bucket/prefix`, with credentials as the
    artifact store takes them. It gets whole versions, and between them only the values that changed. By default a
    folder of the run's own on this host."""
    transport_sharded: bool = False
    """Transport `nccl` with several trainer ranks: each broadcasts its share of the weights, from its own GPU and over
    its own link, in place of the first rank all of them."""
    transport_stall_s: float = Field(30.0, gt=0)
    """A broadcast without progress for so long is given up on both sides, seconds."""
    eval_prompts: int = Field(64, ge=1)
    """Held-out prompts of each environment, scored before the first and after the last step. An environment with fewer
    distinct ones is scored on those."""
    eval_temperature: float = Field(0.0, ge=0)
    """Sampling temperature of answers to held-out prompts; 0 takes the most likely token each time."""
    eval_answers: int = Field(1, ge=1)
    """Answers to each held-out prompt, whose rewards are averaged: what an answer at a temperature above 0 is worth
    (pass@1) is known from several only."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations on the held-out prompts in between, whose figures name the weight version; 0: none."""
    general_questions: list[str] = ["hellaswag", "truthfulqa", "capitals"]
    """Benchmarks (`tasks/evaluate/benchmarks`) asked before the first and after the last step, so that a target that
    learns its environments and forgets the rest is noticed; empty asks none."""
    general_questions_each: int = Field(16, ge=1)
    """Questions of each of them."""
    general_max_new_tokens: int = Field(64, ge=1)
    """Longest answer to one that is answered in words, tokens."""
    checkpoint_every: int = Field(1, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    resume_under_other_pins: bool = False
    """Go on from a checkpoint that was written under another engine, torch, kernel or driver; what differs is then kept
    with the run. An interrupted run may be given this setting later."""
    mismatch: MismatchBounds = MismatchBounds()
    """Bounds that warn, then stop."""
    seed: int = 0
    """Seed of prompts, sampling and order."""

    @model_validator(mode="after")
    def _check(self):
        if self.advantage == "rloo" and self.group_size < 2:
            raise ValueError("advantage=rloo needs group_size of 2 or more: it compares a rollout with the others")
        if self.stragglers == "carry" and not self.max_staleness:
            raise ValueError("stragglers=carry needs max_staleness of 1 or more: what is carried is older by a step")
        if self.filter_groups and self.group_size < 2:
            raise ValueError("filter_groups needs group_size of 2 or more: one reward is always equal to itself")
        if self.transport_sharded and self.transport != "nccl":
            raise ValueError(f"transport_sharded needs transport=nccl: over {self.transport} engines read all from one")
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError("overlong_buffer exceeds max_new_tokens: it is the last part of them")
        if self.eval_answers > 1 and not self.eval_temperature:
            raise ValueError(
                f"eval_answers={self.eval_answers} are all the same at eval_temperature=0: set eval_temperature=1"
            )
        if self.correction_low > self.correction_high:
            raise ValueError("correction_low exceeds correction_high: swap them")
        titles = [e.title for e in self.environments]
        if len(set(titles)) != len(titles):
            raise ValueError(f"two environments have the same name: {sorted(titles)}; give each its own label")
        return self
