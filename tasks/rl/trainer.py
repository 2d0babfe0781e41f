"""The trainer: one policy, its optimizer, and a step over scored answers. It does not know which algorithm runs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from infra.config.rl import RLConfig
from tasks.rl.batch import TrainingBatch
from tasks.rl.corrections import CORRECTIONS, Mismatch
from tasks.rl.errors import MismatchError, TrainerError
from tasks.rl.losses import LOSSES, Clip, Tokens, k3, summed
from tasks.rl.mismatch import mismatch
from tasks.rl.packing import MicroBatch, pack


@dataclass
class _Sums:
    """What the micro-batches of one update add up to."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    lengths: list[torch.Tensor] | None = None


class Trainer:
    """A causal language model in float32 and AdamW.

    model: folder in Hugging Face format, where the run starts. Log-probs are those of softmax(logits / temperature),
    the distribution that answers were sampled from.
    Raises TrainerError for a model whose attention cannot be packed.
    """

    def __init__(self, model: Path, config: RLConfig):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(config.seed)
        self.model = self._load(model)
        self.reference = self._load(model).requires_grad_(False) if config.kl_coefficient else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        warmup = max(1, config.lr_warmup_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / warmup))

    def _load(self, folder: Path) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise TrainerError(f"{folder} has layers of type {sorted(kinds)}: only full attention can be trained here")
        return model.to(self.device).eval()  # no dropout: the ratio of the first update is exactly one

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Update the policy on `batch` and return the step's figures.

        Figures: loss, kl (to the reference), grad_norm, lr, entropy (mean -logp, nats), share_clip (tokens whose
        gradient was cut by the clip), trainer_tokens (inputs computed), micro_batches, trainer_s, and those of
        `tasks.rl.mismatch`. loss, kl, grad_norm and share_clip are of the last update.
        Raises MismatchError before any update when k3 exceeds `mismatch.stop_k3`, TrainerError when a gradient is not
        finite.
        """
        start = time.monotonic()
        micro_batches = pack(batch.groups, self.config.micro_batch_tokens)
        old: list[torch.Tensor] = []
        figures: dict[str, float] = {}
        for _ in range(self.config.updates_per_step):
            self.optimizer.zero_grad(set_to_none=True)
            first, sums = not old, _Sums(lengths=[])
            corrected: list[tuple[torch.Tensor, Tokens]] = []
            for number, micro in enumerate(micro_batches):
                logp_N = self._logprobs(self.model, micro, batch.temperature)
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
            "trainer_tokens": float(sum(len(m.input_T) for m in micro_batches)),
            "micro_batches": float(len(micro_batches)),
            "trainer_s": time.monotonic() - start,
        }

    def logprobs(self, batch: TrainingBatch) -> list[list[np.ndarray]]:
        """Log-probs of every sampled token, float64 [A_i] per answer of each group, nats."""
        out = [[np.zeros(0)] * len(group.answers) for group in batch.groups]
        for micro in pack(batch.groups, self.config.micro_batch_tokens):
            with torch.no_grad():
                logp_N = self._logprobs(self.model, micro, batch.temperature).double().cpu().numpy()
            for sequence, (group, answer) in enumerate(micro.answers):
                out[group][answer] = logp_N[micro.sequence_N == sequence]
        return out

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name; one that is tied to another appears once."""
        for name, weight in self.model.named_parameters():
            yield name, weight.detach()

    def _logprobs(self, model: torch.nn.Module, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """Log-probs of the sampled tokens [N]; logits are computed only where a token was sampled."""
        row_N = self._tensor(micro.row_N)
        logits_NV = model(
            input_ids=self._tensor(micro.input_T)[None],
            position_ids=self._tensor(micro.position_T)[None],
            attention_mask=self._tensor(micro.mask())[None, None],
            logits_to_keep=row_N,
            use_cache=False,
        ).logits[0]
        logits_NV = logits_NV.float() / temperature
        chosen_N = logits_NV.gather(1, self._tensor(micro.target_N)[:, None]).squeeze(1)
        return chosen_N - logits_NV.logsumexp(dim=1)

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
        if self.reference is not None:
            with torch.no_grad():
                reference_N = self._logprobs(self.reference, micro, batch.temperature)
            kl = summed(k3(tokens.logp_T, reference_N), tokens, per_sequence_S)
            sums.kl += kl.item()
            value = value + config.kl_coefficient * kl
        value.backward()
        sums.entropy -= tokens.sum(tokens.logp_T.detach()).sum().item()
        sums.clipped += int((clipped_N & tokens.kept_T).sum())
        sums.lengths.append(lengths_S)

    def _mismatch(self, corrected: list[tuple[torch.Tensor, Tokens]]) -> dict[str, float]:
        if not corrected:
            return mismatch(np.zeros(0), high=1.0, dropped=np.zeros(0, bool), num_nonfinite=0)
        log_ratio_N = torch.cat([ratio for ratio, _ in corrected]).cpu().numpy()
        dropped_N = torch.cat([~tokens.kept_T | (tokens.weight_T == 0) for _, tokens in corrected]).cpu().numpy()
        finite_N = np.isfinite(log_ratio_N)
        figures = mismatch(
            log_ratio_N[finite_N],
            high=self.config.correction_high,
            dropped=dropped_N[finite_N],
            num_nonfinite=int((~finite_N).sum()),
        )
        bound = self.config.mismatch.stop_k3
        if figures["k3"] > bound:
            raise MismatchError(
                f"mismatch k3 of {figures['k3']:.3g} nats per token exceeds rl.mismatch.stop_k3={bound:g}: engine and "
                f"trainer do not compute the same model, so the step was not trained on"
            )
        return figures

    def _update(self, sums: _Sums, batch: TrainingBatch) -> dict[str, float]:
        lengths_S = torch.cat(sums.lengths) if sums.lengths else torch.zeros(0)
        total = LOSSES[self.config.loss].aggregation(lengths_S, batch.longest).total
        num_tokens = max(1, int(lengths_S.sum()))
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.div_(total)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm).item()
        if not np.isfinite(norm):
            raise TrainerError(f"the gradient's norm is {norm}: the step was not applied; lower rl.lr")
        self.optimizer.step()
        return {
            "loss": sums.loss / total,
            "kl": sums.kl / total,
            "grad_norm": norm,
            "lr": self.scheduler.get_last_lr()[0],
            "entropy": sums.entropy / num_tokens,
            "share_clip": sums.clipped / num_tokens,
        }

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
