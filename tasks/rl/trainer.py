"""The trainer: one policy, its optimizer, and a step over scored answers. It does not know which algorithm runs."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from infra.cluster.ranks import Ranks, whole
from infra.config.rl import RLConfig
from tasks.rl.attention import Layout
from tasks.rl.batch import TrainingBatch
from tasks.rl.corrections import CORRECTIONS, Mismatch
from tasks.rl.errors import TrainerError
from tasks.rl.losses import LOSSES, Clip, Tokens, k3, summed
from tasks.rl.mismatch import check, mismatch
from tasks.rl.packing import MicroBatch, pack, share
from tasks.rl.policy import Policy


@dataclass
class _Sums:
    """What the micro-batches of one update add up to on this rank."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    lengths: list[np.ndarray] = field(default_factory=list)


class Trainer:
    """A policy and AdamW, with weights, moments and the sums of gradients in float32.

    model: folder in Hugging Face format, where the run starts. Log-probs are those of softmax(logits / temperature),
    the distribution that answers were sampled from.
    ranks: this trainer is one of so many, each in a process of its own, that are given the same batches and call the
    same methods: weights are sharded over them, and the result is that of one.
    Raises TrainerError for a model that cannot be trained here.
    """

    def __init__(self, model: Path, config: RLConfig, ranks: Ranks | None = None):
        self.config, self.ranks = config, ranks or Ranks()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(config.seed)
        self.policy = self._load(model, config.lora is not None)
        self.reference = None
        if config.kl_coefficient and not config.lora:
            self.reference = self._load(model, False).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.policy.trained().values(), lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        warmup = max(1, config.lr_warmup_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / warmup))

    def _load(self, folder: Path, adapted: bool) -> Policy:
        config = self.config
        policy = Policy(
            folder,
            lora=config.lora if adapted else None,
            checkpointing=config.gradient_checkpointing,
            float32_head=config.numerics == "matched",
        ).to(self.device)
        if self.ranks.world > 1 or config.trainer_dtype != "float32":
            if not dist.is_initialized():
                self.ranks.connect(dist.HashStore())  # alone in this process
            policy.shard(self.ranks, self.device, getattr(torch, config.trainer_dtype))
        return policy

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Update the policy on `batch` and return the step's figures.

        Figures: loss, kl (to the reference), grad_norm, lr, entropy (mean -logp, nats), share_clip (tokens whose
        gradient was cut by the clip), trainer_tokens (inputs computed), micro_batches, trainer_s, and those of
        `tasks.rl.mismatch`. loss, kl, grad_norm and share_clip are of the last update.
        Raises MismatchError before any update when a figure is past its bound in `mismatch`, TrainerError when a
        gradient is not finite.
        """
        start = time.monotonic()
        whole = pack(batch.groups, self.config.micro_batch_tokens, self.ranks.world)
        micro_batches = share(whole, self.ranks.rank, self.ranks.world)
        old: list[torch.Tensor] = []
        figures: dict[str, float] = {}
        for _ in range(self.config.updates_per_step):
            self.optimizer.zero_grad(set_to_none=True)
            first, sums = not old, _Sums()
            corrected: list[tuple[torch.Tensor, Tokens]] = []
            for number, micro in enumerate(micro_batches):
                logp_N = self._logprobs(self.policy, micro, batch.temperature)
                if first:
                    old.append(logp_N.detach())
                log_ratio_N, tokens = self._correct(micro, logp_N, old[number])
                self._backward(micro, tokens, sums, batch)
                corrected.append((log_ratio_N, tokens))
            if first:
                figures |= self._mismatch(corrected)
            figures |= self._update(sums, batch)
        self.scheduler.step()
        return figures | {
            "trainer_tokens": float(sum(len(m.input_T) for m in whole)),
            "micro_batches": float(len(whole)),
            "trainer_s": time.monotonic() - start,
        }

    def logprobs(self, batch: TrainingBatch) -> list[list[np.ndarray]]:
        """Log-probs of every sampled token, float64 [A_i] per answer of each group, nats."""
        out = [[np.zeros(0)] * len(group.answers) for group in batch.groups]
        for micro in pack(batch.groups, self.config.micro_batch_tokens):
            with torch.no_grad():
                logp_N = self._logprobs(self.policy, micro, batch.temperature).double().cpu().numpy()
            for sequence, (group, answer) in enumerate(micro.answers):
                out[group][answer] = logp_N[micro.sequence_N == sequence]
        return out

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`Policy.named_weights`."""
        return self.policy.named_weights()

    def _logprobs(self, policy: Policy, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """Log-probs of the sampled tokens [N]."""
        tensors = [self._tensor(array) for array in (micro.input_T, micro.position_T)]
        layout = Layout(micro.layout, self.device, whole_keys=self.config.numerics == "matched")
        return policy(*tensors, layout, self._tensor(micro.row_N), self._tensor(micro.target_N), temperature)

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        with ExitStack() as stack:
            if self.reference is None:
                stack.enter_context(self.policy.without_adapters())
            return self._logprobs(self.policy if self.reference is None else self.reference, micro, temperature)

    def _correct(self, micro: MicroBatch, logp_N: torch.Tensor, old_N: torch.Tensor) -> tuple[torch.Tensor, Tokens]:
        """D per token (NaN where the engine's log-prob is not finite: such tokens take no part), and the tokens with
        advantages and correction weights."""
        engine_N = self._tensor(micro.logprob_N)
        finite_N = torch.isfinite(engine_N)
        log_ratio_N = torch.where(finite_N, old_N.double() - engine_N, 0.0)
        sequence_N, num = self._tensor(micro.sequence_N), len(micro.answers)
        weight_N, kept_N = CORRECTIONS[self.config.correction](
            Mismatch(sequence_N, finite_N, num, log_ratio_N), self.config.correction_low, self.config.correction_high
        )
        advantage_N = self._tensor(micro.advantage_N).to(logp_N.dtype)
        tokens = Tokens(sequence_N, kept_N, num, logp_N, old_N, advantage_N, weight_N.to(logp_N.dtype))
        return torch.where(finite_N, log_ratio_N, torch.nan), tokens

    def _backward(self, micro: MicroBatch, tokens: Tokens, sums: _Sums, batch: TrainingBatch) -> None:
        """Add the micro-batch's share of the gradient, not yet divided by the batch's denominator."""
        loss, config = LOSSES[self.config.loss], self.config
        terms_N, clipped_N = loss.token_loss(tokens, Clip(config.clip_low, config.clip_high, config.dual_clip))
        lengths_S = tokens.lengths(tokens.logp_T.dtype)
        per_sequence_S = loss.aggregation(lengths_S, batch.longest).per_sequence_S
        value = summed(terms_N * tokens.weight_T, tokens, per_sequence_S)
        sums.loss += value.item()
        if config.kl_coefficient:
            reference_N = self._reference_logprobs(micro, batch.temperature)
            kl = summed(k3(tokens.logp_T, reference_N), tokens, per_sequence_S)
            sums.kl += kl.item()
            value = value + config.kl_coefficient * kl
        value.backward()
        sums.entropy -= tokens.sum(tokens.logp_T.detach()).sum().item()
        sums.clipped += int((clipped_N & tokens.kept_T).sum())
        sums.lengths.append(lengths_S.cpu().numpy())

    def _mismatch(self, corrected: list[tuple[torch.Tensor, Tokens]]) -> dict[str, float]:
        ratios = [ratio.cpu().numpy() for ratio, _ in corrected]
        drops = [(~tokens.kept_T | (tokens.weight_T == 0)).cpu().numpy() for _, tokens in corrected]
        log_ratio_N = self.ranks.gather(np.concatenate([np.zeros(0), *ratios]))
        dropped_N = self.ranks.gather(np.concatenate([np.zeros(0, bool), *drops]))
        finite_N = np.isfinite(log_ratio_N)
        figures = mismatch(
            log_ratio_N[finite_N],
            high=self.config.correction_high,
            dropped=dropped_N[finite_N],
            num_nonfinite=int((~finite_N).sum()),
        )
        check(figures, self.config.mismatch)
        return figures

    def _update(self, sums: _Sums, batch: TrainingBatch) -> dict[str, float]:
        lengths_S = torch.from_numpy(self.ranks.gather(np.concatenate([np.zeros(0), *sums.lengths])))
        loss, kl, entropy, clipped = self.ranks.sum([sums.loss, sums.kl, sums.entropy, float(sums.clipped)])
        total = LOSSES[self.config.loss].aggregation(lengths_S, batch.longest).total
        num_tokens = max(1, int(lengths_S.sum()))
        parameters = list(self.policy.trained().values())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(total / self.ranks.world)  # sharded gradients are means over ranks
        norm = self._clip(parameters)
        if not np.isfinite(norm):
            raise TrainerError(f"the gradient's norm is {norm}: the step was not applied; lower rl.lr")
        self.optimizer.step()
        return {
            "loss": loss / total,
            "kl": kl / total,
            "grad_norm": norm,
            "lr": self.scheduler.get_last_lr()[0],
            "entropy": entropy / num_tokens,
            "share_clip": clipped / num_tokens,
        }

    def _clip(self, parameters: list[torch.nn.Parameter]) -> float:
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        return whole(norm).item()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
