"""The training loop that every kind of trained drafter shares: steps, looks at held-out acceptance, checkpoints."""

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from infra.cluster.ranks import Ranks, spread, whole
from infra.config.drafter import DrafterConfig
from tasks.drafter.curve import Curve
from tasks.drafter.sharded import Sharded, share
from tasks.drafter.sources import ROLLOUTS
from tasks.drafter.staging import Ready, Staging, Step, Told
from tasks.drafter.walk import Walk
from tasks.drafter.worker import WHOLE

GAIN = 0.005  # of acceptance length: less than that is no improvement


class TrainingLoop(ABC):
    """A drafter in training.

    config, device. model: what is trained. packs: numbers of the sequences of each step, for ever, the same for the
    same configuration. train, held_out: what is learned from, and what is looked at.
    ranks: this loop is one of so many, each in a process of its own, whose methods are called alike: they share the
    sequences of a pack and hold the weights between them, and the result is that of one.
    """

    config: DrafterConfig
    ranks: Ranks
    device: str
    model: torch.nn.Module
    train: list
    held_out: list

    def start(self, packs: Iterator[list[int]]) -> None:
        """Call once `model` is on its device."""
        self.packs = packs
        self.sharded = Sharded(self.model, self.ranks, self.device) if self.ranks.world > 1 else None
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=self.config.lr, weight_decay=0.0, fused=True)
        self.staging = Staging(self.device)
        self.curve = Curve()
        self.tokens = 0
        self.best: dict[str, torch.Tensor] = {}

    @abstractmethod
    def batch(self, chosen: Sequence[int]) -> Any:
        """The training sequences with these numbers; its length is the number of rows. `trained`: those that the loss
        reads; `idle()`: the same batch without any of these; `to(device)`: the same there."""

    @abstractmethod
    def loss(self, batch: Any, trained: int) -> torch.Tensor:
        """Sum over the trained rows of a batch divided by `trained`, the number of them in the whole pack, nats."""

    @abstractmethod
    def walk(self, sequences: Sequence) -> Walk:
        """What the engine would accept of the drafter's proposals on some sequences, no more than fill a step."""

    @abstractmethod
    def write(self, folder: Path, tokenizer: str, dtype: str) -> None:
        """Write the drafter as it is to `folder`, in the form that engines load. tokenizer: digest of the target's."""

    @property
    @abstractmethod
    def coverage(self) -> float:
        """Share of the generated tokens that the drafter can propose."""

    @staticmethod
    @abstractmethod
    def sequence(one: Any) -> Any:
        """Its `domain`, `token_ids` and `answers`."""

    def reproducible(self) -> list:
        """Held-out sequences that the target gave at the temperature of serving; rollouts were sampled by an earlier
        version of it."""
        other = {source.domain for source in self.config.traffic if source.source == ROLLOUTS}
        return [one for one in self.held_out if self.sequence(one).domain not in other]

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self.curve.step[-1] if self.curve.step else 0

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the last `patience` looks at the held-out acceptance showed no gain."""
        looks, patience = self.curve.looks(), self.config.patience
        stuck = bool(patience) and len(looks) > patience and max(looks[-patience:]) < max(looks[:-patience]) + GAIN
        return bool(self.curve.step) and (self.steps >= self.config.training_steps or stuck)

    def advance(self, count: int) -> None:
        """The next `count` steps, or those that are left; at the end the drafter is the best of those looked at.

        Raises FloatingPointError when the loss is not finite.
        """
        steps = self.config.training_steps
        if not self.curve.step:
            self._look(0)
        coming = islice(self.packs, max(0, min(count, steps - self.steps)))
        begun: deque[Step] = deque()
        for step, ready in enumerate(self.ahead(coming), self.steps + 1):
            if self.finished:
                break
            lr = self.learning_rate(step)
            begun.append(Step(step, lr, self.learn(ready, lr)))
            looked_at = step == steps or step % max(1, steps // self.config.held_out_looks) == 0
            while len(begun) > 1:  # a step is launched before the loss of the last one is read
                self._enter(begun.popleft())
            if looked_at:
                self._enter(begun.popleft(), looked_at=True)
        for left in begun:
            self._enter(left)
        if self.finished:
            self._restore(self.best)

    def overfit(self, most: int, every: int = 5) -> float:
        """Train on everything in each step, at the peak learning rate, until `WHOLE` of its blocks are proposed right
        to the last token, or for `most` steps; the share reached."""
        self._look(0)
        right = 0.0
        while right < WHOLE and self.steps < most:
            for _ in range(every):
                loss, norm = self.step(range(len(self.train)), self.config.lr)
                self.curve.add(self.steps + 1, loss=loss, lr=self.config.lr, grad_norm=norm)
            walked = self.acceptance(self.train)
            right = walked.accepted[-1] / max(1, walked.drafts)
        return right

    def step(self, pack: Sequence[int], lr: float) -> tuple[float, float]:
        """One optimizer step on the sequences of `pack`; (loss, gradient norm before clipping)."""
        return self._read(self.learn(self._ready(pack), lr))

    def ahead(self, packs: Iterator[Sequence[int]]) -> Iterator[Ready]:
        """What `learn` takes of each pack, made while the one before is learned from."""
        with ThreadPoolExecutor(1) as thread:
            making: deque[Future] = deque()
            for pack in packs:
                making.append(thread.submit(self._ready, pack))
                if len(making) > 1:
                    yield making.popleft().result()
            for made in making:
                yield made.result()

    def _ready(self, pack: Sequence[int]) -> Ready:
        mine = share([len(self.sequence(self.train[i]).token_ids) for i in pack], self.ranks)
        if mine:
            batch = self.batch([pack[i] for i in mine])
            return Ready(self.staging(batch), len(batch), batch.trained)
        # Without work, it goes through the motions: it holds weights.
        return Ready(self.staging(self.batch(pack[:1]).idle()), 0, 0)

    def learn(self, ready: Ready, lr: float) -> Told:
        """As `step`, on this rank's part of a pack; what it returns is not waited for."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        rows, trained = self.ranks.sum([ready.rows, ready.trained])
        with self._precision():
            loss = self.loss(ready.batch, max(1, round(trained)))
        (loss * self.ranks.world).backward()  # gradients of parts are means over ranks
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += round(rows)
        return Told.of(loss, norm)

    def _read(self, told: Told) -> tuple[float, float]:
        """(loss of the whole pack, gradient norm) of a step on all ranks."""
        loss, norm = told.read()
        return self.ranks.sum([loss])[0], norm

    def compute(self, of: Callable[..., Any], *args: Any) -> Any:
        """`of(model, *args)`. A collective call, but for within `whole_weights`."""
        return of(self.model, *args) if self.sharded is None else self.sharded(of, *args)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """No gradients, and `compute` is no collective call. Entering and leaving it is."""
        with torch.no_grad(), self.sharded.whole() if self.sharded else nullcontext():
            yield

    def learning_rate(self, step: int) -> float:
        """Of step 1..training_steps: linear warm-up to the peak, then a cosine down to a tenth of it."""
        steps, peak = self.config.training_steps, self.config.lr
        warmup = max(1, round(self.config.warmup_share * steps))
        if step <= warmup:
            return peak * step / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def acceptance(self, sequences: Sequence | None = None) -> Walk:
        """What the engine would accept of the drafter's proposals on `sequences` (the held-out ones by default).

        The answers were sampled from the target and the drafter proposes greedily, so this estimates serving at the
        temperature of the answers.
        """
        self.model.eval()
        counted = Walk(0, [0] * self.config.num_speculative_tokens)
        with self.whole_weights():
            mine = (self.held_out if sequences is None else sequences)[self.ranks.rank :: self.ranks.world]
            for some in self._fitting(mine):
                counted += self.walk(some)
        drafts, *accepted = self.ranks.sum([counted.drafts, *counted.accepted])
        return Walk(round(drafts), [round(number) for number in accepted])

    def _fitting(self, sequences: Sequence) -> Iterator[list]:
        """Parts of `sequences` of at most `micro_batch_tokens`, or one that is longer."""
        part, tokens = [], 0
        for one in sequences:
            length = len(self.sequence(one).token_ids)
            if part and tokens + length > self.config.micro_batch_tokens:
                yield part
                part, tokens = [], 0
            part.append(one)
            tokens += length
        if part:
            yield part

    def save(self, path: Path) -> None:
        """Everything that the next step depends on, in one file that appears whole or not at all. The first rank writes
        it, for as many or others."""
        scratch = path.with_suffix(".unfinished")
        state = {
            "weights": {name: whole(p.detach()) for name, p in self.parameters.items()},
            "moments": [
                {key: whole(value) for key, value in self.optimizer.state.get(p, {}).items()}
                for p in self.parameters.values()
            ],
            "curve": self.curve.model_dump(),
            "tokens": self.tokens,
            "best": {name: whole(p) for name, p in self.best.items()},
        }
        if self.ranks.rank > 0:
            return
        with scratch.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)

    def load(self, path: Path) -> None:
        """Go on where `save` was called, on the same arguments, by as many ranks or others."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self._restore(self._spread(state["weights"]))
        for p, moments in zip(self.parameters.values(), state["moments"], strict=True):
            self.optimizer.state[p] = {
                key: value if key == "step" else spread(value, p) for key, value in moments.items()
            }
        self.curve, self.tokens = Curve(**state["curve"]), state["tokens"]
        self.best = self._spread(state["best"])
        for _ in islice(self.packs, self.steps):
            pass

    def _enter(self, step: Step, looked_at: bool = False) -> None:
        """Keep what a step came to."""
        loss, norm = self._read(step.told)
        if not math.isfinite(loss):
            given = self.config.lr
            raise FloatingPointError(f"loss of drafter step {step.number} is {loss}: lower drafter.lr ({given})")
        entry = dict(loss=loss, lr=step.lr, grad_norm=norm)
        if looked_at:
            self._look(step.number, **entry)
        else:
            self.curve.add(step.number, **entry)

    def _look(self, step: int, **entry: float) -> None:
        before, now = self.curve.looks(), self.acceptance().length
        self.curve.add(step, held_out_acceptance=now, **entry)
        if now >= max(before, default=now):
            self.best = {name: p.detach().clone() for name, p in self.parameters.items()}

    def _spread(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: spread(weight, self.parameters[name]) for name, weight in weights.items()}

    def _restore(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def _precision(self):
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device, dtype=getattr(torch, self.config.dtype))
