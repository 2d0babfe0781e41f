"""The steps that train a head. Arguments and results are JSON, so that a finished step is not done again."""

import asyncio
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra.config.flows import DrafterFlowConfig
from infra.engine.drafters import speculation
from infra.services import runs
from infra.services.home import home
from infra.services.prefect import durable
from infra.services.progress import report
from infra.services.spans import Spans
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.drafter.answers import Answered
from tasks.drafter.contract import ContractError, check, check_draft_model, check_whole
from tasks.drafter.export import tokenizer_digest
from tasks.drafter.remote import RemoteWorker
from tasks.drafter.serving import capturing, engine, measuring, replay
from tasks.drafter.states import Sequence
from tasks.drafter.streaming import stream
from tasks.drafter.worker import WHOLE, Progress, TrainingResult

COMMAND = "lockstep drafter"
REPORT_EVERY = 5  # optimizer steps between two progress lines, at least
REPORT_S = 1.0  # between two progress lines where a step is shorter: the trainer stops at each
OVERFIT_STEPS = 150  # that a head is given to learn one answer by heart

_trainer: RemoteWorker | None = None  # inside `trainer`


class Overfitted(BaseModel):
    """drafts, whole: target passes on the sample when served, and how many accepted every proposed token."""

    drafts: int
    whole: int
    spans: dict[str, float]


class Trained(BaseModel):
    """head: the drafter after the last step."""

    head: ArtifactRef
    result: TrainingResult
    spans: dict[str, float]


@contextmanager
def trainer(config: DrafterFlowConfig) -> Iterator[None]:
    """The trainer's processes for the steps inside the block. Their imports take as long as an engine's start: begin
    before the engine that comes first."""
    global _trainer
    _trainer = RemoteWorker(config)
    try:
        yield
    finally:
        _trainer = None  # its last reference: the processes end


@durable(name="learn one answer by heart", pools=["engines", "trainer"])
def overfit_one(target: ArtifactRef, states: ArtifactRef, sample: str, config: DrafterFlowConfig) -> Overfitted:
    """Train a new head on the one captured sequence with the key `sample`, a greedy answer, and serve it the same
    prompt; call it inside `trainer`.

    Raises ContractError when the head cannot learn it, or the engine accepts no block of it to the last token: then
    captured states, training and serving do not mean the same, and no amount of training would help.
    """
    spans, store, settings = Spans(), open_store(), config.drafter
    model = store.open(target)
    _trainer.look_after()
    with _scratch() as scratch:
        with spans.measure("trainer"):
            report("teaching a head one answer by heart")
            learned = _trainer.do("overfit", model, store.open(states), settings, sample, OVERFIT_STEPS)
            if learned < WHOLE:
                raise ContractError(
                    f"a head trained on one answer proposes {learned:.0%} of its blocks right after {OVERFIT_STEPS} "
                    f"steps, {WHOLE:.0%} are needed: states and tokens do not fit, or drafter.lr ({settings.lr}) does "
                    f"not; drafter.overfit_check=false leaves this check out"
                )
            _trainer.do("export", scratch / "head", tokenizer_digest(model), config.engine.dtype)
            expected = _trainer.do("expected")
        proposing = speculation(scratch / "head", settings.num_speculative_tokens)
        with engine(measuring(model, config, proposing), config, spans) as handle, spans.measure("engine"):
            served = asyncio.run(replay(handle, expected, config.engine.max_concurrent_sequences))
    check_whole(served)
    report(f"a head that learned one answer is accepted whole in {served.accepted[-1]} of {served.drafts} passes")
    return Overfitted(drafts=served.drafts, whole=served.accepted[-1], spans=spans.seconds)


@durable(name="train head", pools=["trainer"])
def train_head(
    target: ArtifactRef, states: ArtifactRef, previous: ArtifactRef | None, config: DrafterFlowConfig
) -> Trained:
    """Train a head for `target` on `states`, from nothing or from the drafter `previous`; call it inside `trainer`.
    Interrupted, it goes on from its last checkpoint.

    Raises ContractError when what was written does not fit the target.
    """
    store, settings = open_store(), config.drafter
    model, seen = store.open(target), store.open(states)
    inputs = [target, states, *([previous] if previous else [])]
    _trainer.look_after()
    begin = _trainer.begin("begin", model, seen, settings, previous and store.open(previous))
    return _train(begin, model, check, inputs, _checkpoint(settings, *inputs), config, _steps(config))


@durable(name="train head on a stream", pools=["engines", "trainer"])
def train_head_streaming(
    target: ArtifactRef,
    states: ArtifactRef,
    answers: list[Answered],
    previous: ArtifactRef | None,
    config: DrafterFlowConfig,
    run: str,
) -> Trained:
    """As `train_head` does on the states of all `answers`, of which only those of `states` are kept, the held-out ones
    among them; the others come from a capture engine while training goes on. Call it inside `trainer`."""
    from tasks.drafter.dataset import packs, split_by_domain

    store, settings = open_store(), config.drafter
    model, seen = store.open(target), store.open(states)
    train, held_out = split_by_domain(answers, settings.held_out_share, settings.seed)
    sequences = [Sequence(**answered.model_dump()) for answered in train]
    _trainer.look_after()
    begin = _trainer.begin(
        "begin_streamed", model, seen, [a.key for a in held_out], sequences, settings, previous and store.open(previous)
    )
    inputs = [target, states, *([previous] if previous else [])]
    checkpoint = _checkpoint(settings, *inputs, "".join(a.key for a in answers))

    def steps(done: int, spans: Spans) -> Progress:
        with capturing(model, runs.read(run).folder / "stream", config, spans) as (handle, layout):
            report(f"streaming hidden states: {layout.bytes_per_token} bytes a token, none kept")
            return stream(
                handle,
                lambda chunk, count: _trainer.begin("consume", chunk, count),
                _trainer.wait,
                train,
                packs(sequences, settings),
                runs.read(run).folder / "stream" / "chunks",
                done=done,
                layout=layout,
                budget_bytes=int(settings.capture_budget_gib * 2**30),
                concurrency=config.engine.max_concurrent_sequences,
                every=REPORT_EVERY,
                steps=settings.training_steps,
            )

    return _train(begin, model, check, inputs, checkpoint, config, steps)


@durable(name="train draft model", pools=["trainer"])
def train_draft_model(
    target: ArtifactRef, answers: list[Answered], previous: ArtifactRef | None, config: DrafterFlowConfig
) -> Trained:
    """Distil a small model for `target` on its `answers`, from some of its layers or from the drafter `previous`; call
    it inside `trainer`. Interrupted, it goes on from its last checkpoint.

    Raises ContractError when what was written does not fit the target.
    """
    store, settings = open_store(), config.drafter
    model, inputs = store.open(target), [target, *([previous] if previous else [])]
    _trainer.look_after()
    begin = _trainer.begin("begin_draft_model", model, answers, settings, previous and store.open(previous))
    keys = "".join(answered.key for answered in answers)
    checkpoint = _checkpoint(settings, *inputs, keys)
    return _train(begin, model, check_draft_model, inputs, checkpoint, config, _steps(config))


def _steps(config: DrafterFlowConfig) -> Callable[[int, Spans], Progress]:
    """Training on what the worker holds."""

    def steps(done: int, spans: Spans) -> Progress:
        with spans.measure("trainer"):
            count, begun = REPORT_EVERY, time.monotonic()
            while not (at := _trainer.do("advance", count)).finished:
                took, begun = time.monotonic() - begun, time.monotonic()
                count = max(REPORT_EVERY, min(2 * count, round(count * REPORT_S / took)))
                told = f"training: loss {at.loss:.3f}, held-out acceptance {at.acceptance:.2f}"
                report(told, at.step, config.drafter.training_steps)
            return at

    return steps


def _train(
    begin: list[Any],
    model: Path,
    fits: Callable[[Path, Path], None],
    inputs: list[ArtifactRef],
    checkpoint: Path,
    config: DrafterFlowConfig,
    train: Callable[[int, Spans], Progress],
) -> Trained:
    """begin: the worker's call that builds the drafter. fits: raises ContractError unless (drafter, target) fit.
    train: the steps that are left when so many are done."""
    spans, store, steps = Spans(), open_store(), config.drafter.training_steps
    worker, tokenizer = _trainer, tokenizer_digest(model)
    with _scratch() as scratch:
        head = scratch / "head"
        with spans.measure("trainer"):
            report("building the drafter")
            worker.wait(begin)
            if done := worker.do("resume", checkpoint):
                report(f"training goes on after step {done}")
        at = train(done, spans)
        report(f"trained: held-out acceptance {at.acceptance:.2f}", at.step, steps)
        if at.step < steps:
            report(f"acceptance on held-out answers no longer improves: stopped after {at.step} of {steps} steps")
        with spans.measure("trainer"):
            worker.do("export", head, tokenizer, config.engine.dtype)
            outcome = worker.do("result")
        report("checking the drafter's contract with its target")
        fits(head, model)
        trained = Trained(
            head=store.put(head, "drafter", producer=COMMAND, inputs=inputs),
            result=outcome,
            spans=spans.seconds,
        )
    checkpoint.unlink(missing_ok=True)
    return trained


def _checkpoint(*inputs: BaseModel | str) -> Path:
    """Where a training with these inputs keeps its checkpoint."""
    named = "".join(part if isinstance(part, str) else part.model_dump_json() for part in inputs)
    folder = home() / "checkpoints" / "drafter"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.pt"


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder beside the store, which then shares the files instead of copying them."""
    home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="drafter-", dir=home()) as folder:
        yield Path(folder)
