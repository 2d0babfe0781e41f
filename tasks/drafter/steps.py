"""The steps of making a drafter. Arguments and results are JSON, so that a finished step is not done again."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from infra.cluster.session import session
from infra.config.drafter import DrafterConfig
from infra.config.flows import DrafterFlowConfig
from infra.config.target import TargetConfig
from infra.engine.spec import Capture, EngineSpec, Role, Speculation
from infra.lineage.lineage import Lineage
from infra.lineage.source import base_version
from infra.lineage.versions import Version
from infra.services import runs
from infra.services.home import home
from infra.services.prefect import durable
from infra.services.progress import report
from infra.services.spans import Spans
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.drafter import figures
from tasks.drafter import traffic as sources
from tasks.drafter.answers import Answered, Answering, answer
from tasks.drafter.capture import capture, layer_bytes
from tasks.drafter.contract import captured_layers, check, check_served
from tasks.drafter.export import tokenizer_digest
from tasks.drafter.serving import engine, measure_held_out, measuring, placement, replay
from tasks.drafter.states import StatesWriter
from tasks.drafter.traffic import Messages, Traffic
from tasks.drafter.walk import Walk
from tasks.drafter.worker import Expected, TrainerWorker, TrainingResult
from tasks.evaluate.acceptance import Measurement

if TYPE_CHECKING:
    import pandas as pd

COMMAND = "lockstep drafter"
REPORT_EVERY = 5  # optimizer steps between two progress lines

_trainer: Any = None  # the actor inside `trainer`


class Chosen(BaseModel):
    """The target a drafter is made for, and the drafter it starts from."""

    model_config = ConfigDict(frozen=True)

    target: Version
    previous: Version | None


class Answers(BaseModel):
    """What the target answered: to train on, and measured without speculation on the held-out prompts."""

    train: list[Answered]
    plain: Measurement
    spans: dict[str, float]


class CapturedStates(BaseModel):
    """States of `sequences` answers, `tokens` in all."""

    artifact: ArtifactRef
    sequences: int
    tokens: int
    spans: dict[str, float]


class Trained(BaseModel):
    """start: the head before the first step. head: after the last."""

    start: ArtifactRef
    head: ArtifactRef
    result: TrainingResult
    spans: dict[str, float]


class Measured(BaseModel):
    """A drafter on the held-out prompts."""

    measurement: Measurement
    spans: dict[str, float]


@durable(name="choose target and drafter to start from", outlives_edits=True)
def choose(config: TargetConfig, warm_start: bool, target: str | None, run: str) -> Chosen:
    """The target given as a label, else the newest version; the drafter of it or of its nearest ancestor that has one.

    Kept with the run: there may be newer ones when it resumes.
    """
    lineage = Lineage()
    version = lineage.get(target) if target else lineage.resolve(config.name, "latest")
    version = version or base_version(lineage, open_store(), config)
    ancestor, previous = version, None
    while warm_start and ancestor is not None and previous is None:
        previous = next(iter(lineage.drafters(ancestor)), None)
        ancestor = lineage.get(ancestor.parent) if ancestor.parent else None
    return Chosen(target=version, previous=previous)


@durable(name="gather traffic")
def gather_traffic(config: DrafterConfig, given: dict[str, list[Messages]], target: ArtifactRef) -> Traffic:
    """Prompts to train on and held-out ones to measure on. given: conversations of sources that another room owns."""
    return sources.gather(
        config.traffic,
        sources.chat_template(open_store().open(target)),
        held_out=config.eval_prompts,
        max_prompt_tokens=config.max_prompt_tokens,
        seed=config.seed,
        given=given,
    )


@durable(name="answer prompts", pools=["engines"])
def answer_prompts(target: Version, traffic: Traffic, config: DrafterFlowConfig, run: str) -> Answers:
    """The target's answers to the training prompts, and its speed without speculation on the held-out ones."""
    spans = Spans()
    answering = Answering(
        max_new_tokens=config.drafter.max_new_tokens,
        temperature=config.drafter.temperature,
        seed=config.drafter.seed,
        concurrency=config.engine.max_concurrent_sequences,
    )
    with (
        engine(measuring(open_store().open(target.artifact), config), config, spans) as handle,
        spans.measure("engine"),
    ):
        train = asyncio.run(
            answer(handle, traffic.train, answering, lambda done, of: report("answering training prompts", done, of))
        )
        report("measuring the target without speculation")
        plain = measure_held_out(handle, traffic, config, subject=target.subject, suffix="_plain")
    return Answers(train=train, plain=plain, spans=spans.seconds)


@durable(name="capture hidden states", pools=["engines"])
def capture_states(target: ArtifactRef, answers: list[Answered], config: DrafterFlowConfig, run: str) -> CapturedStates:
    """Hidden states of the answers in the store. What an interrupted attempt captured is kept."""
    spans, store = Spans(), open_store()
    model, folder = store.open(target), runs.read(run).folder / "capture"
    layer_ids = captured_layers(model)
    bytes_per_token = layer_bytes(model, len(layer_ids), config.engine.dtype)
    tokens = sum(len(a.token_ids) for a in answers)
    staging = folder / "staging"
    shutil.rmtree(staging, ignore_errors=True)  # what an interrupted engine left belongs to no request any more
    spec = EngineSpec(
        model=model, role=Role.capture, config=config.engine, capture=Capture(layer_ids=layer_ids, folder=staging)
    )
    report(
        f"{tokens * bytes_per_token / 2**20:.0f} MiB of hidden states: {tokens} tokens, {bytes_per_token} bytes each"
    )
    with (
        StatesWriter(folder / "states", layer_ids) as writer,
        engine(spec, config, spans) as handle,
        spans.measure("engine"),
    ):
        captured = asyncio.run(
            capture(
                handle,
                answers,
                writer,
                bytes_per_token=bytes_per_token,
                budget_bytes=int(config.drafter.capture_budget_gib * 2**30),
                concurrency=config.engine.max_concurrent_sequences,
                on_progress=lambda done, of: report("capturing hidden states", done, of),
            )
        )
    if captured < len(answers):
        report(f"the byte budget holds {captured} of {len(answers)} answers: raise drafter.capture_budget_gib")
    artifact = store.put(folder / "states", "hidden-states", producer=COMMAND, inputs=[target])
    shutil.rmtree(folder)
    kept = sum(len(a.token_ids) for a in answers[:captured])
    return CapturedStates(artifact=artifact, sequences=captured, tokens=kept, spans=spans.seconds)


@contextmanager
def trainer(config: DrafterFlowConfig) -> Iterator[None]:
    """The trainer's process for `train_head` inside the block. Its imports take as long as an engine's start: begin
    before the engine that comes first."""
    global _trainer
    reserved = placement(config)
    _trainer = session().actor(
        TrainerWorker, cpus=reserved.trainer.cpus, gpus=reserved.trainer.gpus, threads=reserved.trainer_threads
    )
    _trainer.warm_up.remote()
    try:
        yield
    finally:
        _trainer = None  # its last reference: the process ends


@durable(name="train head", pools=["trainer"])
def train_head(
    target: ArtifactRef, states: ArtifactRef, previous: ArtifactRef | None, config: DrafterFlowConfig
) -> Trained:
    """Train a head for `target` on `states`, from nothing or from the drafter `previous`; call it inside `trainer`.

    Raises ContractError when what was written does not fit the target.
    """
    spans, store, settings = Spans(), open_store(), config.drafter
    model, worker, result = store.open(target), _trainer, session().result
    tokenizer = tokenizer_digest(model)
    home().mkdir(parents=True, exist_ok=True)  # beside the store, which then shares the files instead of copying them
    with tempfile.TemporaryDirectory(prefix="drafter-", dir=home()) as scratch:
        start, head = Path(scratch) / "start", Path(scratch) / "head"
        with spans.measure("trainer"):
            report("building the head")
            result(worker.begin.remote(model, store.open(states), settings, previous and store.open(previous)))
            result(worker.export.remote(start, tokenizer, config.engine.dtype))
            done = 0
            while done < settings.training_steps:
                at = result(worker.advance.remote(REPORT_EVERY))
                done = at.step
                seen = f"training: loss {at.loss:.3f}, held-out acceptance {at.acceptance:.2f}"
                report(seen, done, settings.training_steps)
            result(worker.export.remote(head, tokenizer, config.engine.dtype))
            outcome = result(worker.result.remote())
        report("checking the head's contract with its target")
        check(head, model)
        inputs = [target, states, *([previous] if previous else [])]
        return Trained(
            start=store.put(start, "drafter-start", producer=COMMAND, inputs=inputs),
            head=store.put(head, "drafter", producer=COMMAND, inputs=inputs),
            result=outcome,
            spans=spans.seconds,
        )


@durable(name="measure drafter", pools=["engines"])
def measure_drafter(
    target: Version,
    head: ArtifactRef,
    subject: str,
    traffic: Traffic,
    expected: Expected | None,
    config: DrafterFlowConfig,
    suffix: str = "",
) -> Measured:
    """Serve `head` with the target and measure it on the held-out prompts.

    expected: what it should accept on captured sequences; served answers are greedy, so it is compared only when the
    captured ones were. suffix: of the figures' names.
    Raises ContractError when the engine accepts something else.
    """
    spans, store, settings = Spans(), open_store(), config.drafter
    speculation = Speculation(
        method=settings.kind, model=store.open(head), num_speculative_tokens=settings.num_speculative_tokens
    )
    spec = measuring(store.open(target.artifact), config, speculation)
    with engine(spec, config, spans) as handle, spans.measure("engine"):
        report(f"measuring acceptance of {subject}{suffix.replace('_', ' ')}")
        measurement = measure_held_out(handle, traffic, config, subject=subject, suffix=suffix)
        if expected and settings.temperature == 0:
            served = asyncio.run(replay(handle, expected))
            check_served(served, Walk(expected.drafts, expected.accepted), len(expected.prompts))
    return Measured(measurement=measurement, spans=spans.seconds)


@durable(name="write drafter evidence")
def write_evidence(
    target: Version,
    drafter: Version,
    states: CapturedStates,
    trained: Trained,
    plain: Measurement,
    before: Measurement,
    after: Measurement,
    traffic: Traffic,
) -> ArtifactRef:
    """The evidence table about `drafter`, and its training curve, in the store."""
    rows = figures.rows(
        drafter.subject,
        trained.result,
        plain,
        before,
        after,
        dataset_digest=traffic.held_out_digest(),
        captured_tokens=states.tokens,
        captured_bytes=states.artifact.bytes,
    )
    with tempfile.TemporaryDirectory() as folder:
        figures.write(Path(folder), rows, trained.result, plain, COMMAND)
        inputs = [target.artifact, drafter.artifact]
        return open_store().put(Path(folder), "evidence", producer=COMMAND, inputs=inputs)


def read_evidence(artifact: ArtifactRef) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """(evidence table, training curve) that `write_evidence` wrote."""
    return figures.read(open_store().open(artifact))
