"""The steps of making a drafter. Arguments and results are JSON, so that a finished step is not done again."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from infra.config.drafter import DrafterConfig
from infra.config.flows import DrafterFlowConfig
from infra.config.target import TargetConfig
from infra.engine.drafters import speculation
from infra.engine.spec import EngineHandle
from infra.lineage.lineage import Lineage
from infra.lineage.source import base_version
from infra.lineage.versions import Version
from infra.services import runs
from infra.services.prefect import durable
from infra.services.progress import report
from infra.services.spans import Spans
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.drafter import figures, sources
from tasks.drafter.answers import Answered, Answering, answer, longest
from tasks.drafter.capture import capture
from tasks.drafter.contract import check_served
from tasks.drafter.serving import capturing, engine, measure_held_out, measure_under_load, measuring, replay
from tasks.drafter.sources import rollouts
from tasks.drafter.states_writer import StatesWriter
from tasks.drafter.template import ChatTemplate
from tasks.drafter.traffic import Traffic
from tasks.drafter.walk import Walk
from tasks.drafter.worker import Expected, TrainingResult
from tasks.evaluate.acceptance import Measurement, told
from tasks.evaluate.identity import read_again

if TYPE_CHECKING:
    import pandas as pd

COMMAND = "lockstep drafter"
KIND_TAG = "lockstep.drafter_kind"  # of a registered drafter
GREEDY = 4  # answers at temperature 0 beside those at the temperature of serving, for the overfit check


class Chosen(BaseModel):
    """The target a drafter is made for, and the drafter it starts from."""

    model_config = ConfigDict(frozen=True)

    target: Version
    previous: Version | None


class Measured(BaseModel):
    """An engine on the held-out prompts. measurement: at temperature 0. sampled: at the temperature of serving, where
    that is another. load: at each of `load_concurrency`. again: of an engine without a drafter, what it says at each
    place of its answers when it reads them (`tasks.evaluate.identity`)."""

    measurement: Measurement
    again: dict[str, list[list[int]]] | None = None
    sampled: Measurement | None = None
    load: list[Measurement] = []
    spans: dict[str, float] = {}

    def all(self) -> list[Measurement]:
        """Greedy, then sampled and under load, as far as they were made."""
        return [self.measurement, *([self.sampled] if self.sampled else []), *self.load]


class Answers(BaseModel):
    """What the target answered: to train on, and measured without speculation on the held-out prompts. sample: key of
    the greedy answer that the overfit check learns."""

    train: list[Answered]
    sample: str
    plain: Measured
    spans: dict[str, float]


class CapturedStates(BaseModel):
    """States of `sequences` answers, `tokens` in all."""

    artifact: ArtifactRef
    sequences: int
    tokens: int
    spans: dict[str, float]


@durable(name="choose target and drafter to start from", outlives_edits=True)
def choose(config: TargetConfig, warm_start: bool, target: str | None, run: str, kind: str = "eagle3") -> Chosen:
    """The target given as a label, else the newest version; the drafter of this `kind` of it or of its nearest ancestor
    that has one.

    Kept with the run: there may be newer ones when it resumes.
    """
    lineage = Lineage()
    version = lineage.get(target) if target else lineage.resolve(config.name, "latest")
    version = version or base_version(lineage, open_store(), config)
    ancestor, previous = version, None
    while warm_start and kind != "ngram" and ancestor is not None and previous is None:
        alike = (d for d in lineage.drafters(ancestor) if d.tags.get(KIND_TAG, "eagle3") == kind)
        previous = next(alike, None)
        ancestor = lineage.get(ancestor.parent) if ancestor.parent else None
    return Chosen(target=version, previous=previous)


@durable(name="answer prompts", pools=["engines"])
def answer_prompts(
    target: Version, traffic: Traffic, config: DrafterFlowConfig, run: str, plain: Measurement | None = None
) -> Answers:
    """The target's answers to the training prompts and, where asked for, those of the RL run that made it; its speed
    without speculation on the held-out prompts, or what is known of that already (`plain`)."""
    spans, store = Spans(), open_store()
    model = store.open(target.artifact)
    answering = Answering(
        max_new_tokens=config.drafter.max_new_tokens,
        max_prompt_tokens=config.drafter.max_prompt_tokens,
        temperature=config.drafter.temperature,
        seed=config.drafter.seed,
        concurrency=config.engine.max_concurrent_sequences,
    )
    with (
        engine(measuring(model, config), config, spans) as handle,
        spans.measure("engine"),
    ):
        train = asyncio.run(
            answer(
                handle,
                traffic.train,
                answering,
                ChatTemplate(model),
                on_progress=lambda done, of: report("answering training prompts", done, of),
            )
        )
        greedy = train
        if config.drafter.temperature:  # a few more, which the engine gives again when it is asked again
            again = answering.model_copy(update={"temperature": 0.0})
            greedy = asyncio.run(answer(handle, traffic.train[:GREEDY], again, ChatTemplate(model)))
            train = greedy + train
        if plain:
            without = Measured(measurement=plain)
        else:
            report("measuring the target without speculation")
            without = measure_without(handle, traffic, config, target.subject)
    for source in config.drafter.traffic:
        if source.source == sources.ROLLOUTS:
            folders = [store.open(evidence) for evidence in target.evidence]
            found = rollouts.read(folders, source.domain, source.prompts, longest=config.engine.max_model_len)
            report(f"{len(found)} rollouts of the run that made {target.label}")
            train = train + found
    sample = longest(greedy, config.drafter.micro_batch_tokens)
    # First, so that the byte budget cuts off others.
    train = sorted(train, key=lambda answered: answered is not sample)
    return Answers(train=train, sample=sample.key, plain=without, spans=spans.seconds)


@durable(name="capture hidden states", pools=["engines"])
def capture_states(target: ArtifactRef, answers: list[Answered], config: DrafterFlowConfig, run: str) -> CapturedStates:
    """Hidden states of the answers in the store. What an interrupted attempt captured is kept."""
    spans, store = Spans(), open_store()
    model, folder = store.open(target), runs.read(run).folder / "capture"
    tokens = sum(len(a.token_ids) for a in answers)
    with capturing(model, folder, config, spans) as (handle, layout):
        size = layout.bytes_per_token
        report(f"{tokens * size / 2**20:.0f} MiB of hidden states: {tokens} tokens, {size} bytes each")
        with StatesWriter(folder / "states", layout.layer_ids) as writer:
            captured = asyncio.run(
                capture(
                    handle,
                    answers,
                    writer,
                    bytes_per_token=size,
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


def kept_when_streaming(answers: Answers, config: DrafterConfig) -> list[Answered]:
    """The sequences whose states are kept: the held-out ones, and the one that is learned by heart."""
    from tasks.drafter.dataset import split_by_domain

    _, held_out = split_by_domain(answers.train, config.held_out_share, config.seed)
    keys = {answers.sample, *(answered.key for answered in held_out)}
    return [answered for answered in answers.train if answered.key in keys]


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
    """Serve the drafter `head` with the target and measure it on the held-out prompts; one that another was warmed
    from, with a `suffix` to the figures' names, only greedily and at one concurrency.

    expected: what it should accept of answers that the target gives again; served answers are greedy, so it is compared
    only when those were.
    Raises ContractError when the engine accepts something else.
    """
    spans, store, settings = Spans(), open_store(), config.drafter
    proposing = speculation(store.open(head), settings.num_speculative_tokens)
    spec = measuring(store.open(target.artifact), config, proposing)
    with engine(spec, config, spans) as handle, spans.measure("engine"):
        report(f"measuring acceptance of {subject}{suffix.replace('_', ' ')}")
        measured = measure_engine(handle, traffic, config, subject, suffix, briefly=bool(suffix))
        if expected and expected.prompts and settings.temperature == 0:
            served = asyncio.run(replay(handle, expected, config.engine.max_concurrent_sequences))
            check_served(served, Walk(expected.drafts, expected.accepted), len(expected.prompts))
    report(f"{subject}{suffix.replace('_', ' ')}: {told(measured.measurement)}")
    if measured.sampled:
        report(f"{subject} at temperature {settings.temperature:g}: {told(measured.sampled)}")
    return measured.model_copy(update={"spans": spans.seconds})


def measure_engine(
    handle: EngineHandle, traffic: Traffic, config: DrafterFlowConfig, subject: str, suffix: str, briefly: bool = False
) -> Measured:
    """A running engine on the held-out prompts. briefly: greedily at one concurrency alone."""
    greedy = measure_held_out(handle, traffic, config, subject=subject, suffix=suffix)
    if briefly:
        return Measured(measurement=greedy)
    temperature, sampled = config.drafter.temperature, None
    if temperature:
        report(f"measuring at temperature {temperature:g}")
        labels = dict(subject=subject, suffix=f"_sampled{suffix}")
        sampled = measure_held_out(handle, traffic, config, temperature=temperature, **labels)
    load = measure_under_load(handle, traffic, config, subject=subject, suffix=suffix)
    return Measured(measurement=greedy, sampled=sampled, load=load)


def measure_without(handle: EngineHandle, traffic: Traffic, config: DrafterFlowConfig, subject: str) -> Measured:
    """A running engine that does not speculate, on the held-out prompts: what drafters are compared with."""
    measured = measure_engine(handle, traffic, config, subject, "_plain")
    outputs, limit = measured.measurement.outputs, config.engine.max_concurrent_sequences
    again = asyncio.run(read_again(handle, traffic.held_out_ids(), outputs, concurrency=limit))
    return measured.model_copy(update={"again": again})


@durable(name="write drafter evidence")
def write_evidence(
    target: Version,
    drafter: Version,
    result: TrainingResult | None,
    captured: int,
    states: ArtifactRef | None,
    plain: Measured,
    before: Measured | None,
    after: Measured,
    traffic: Traffic,
) -> ArtifactRef:
    """The evidence table about `drafter`, and its training curve, in the store. result, before: where it was trained;
    captured, states: tokens, and their hidden states where it learned from some."""
    rows = figures.rows(
        drafter.subject,
        result,
        plain.all(),
        before.all() if before else [],
        after.all(),
        again=plain.again,
        dataset_digest=traffic.held_out_digest(),
        captured_tokens=captured,
        captured_bytes=states.bytes if states else 0,
    )
    with tempfile.TemporaryDirectory() as folder:
        figures.write(Path(folder), rows, result, plain.measurement, COMMAND)
        inputs = [target.artifact, drafter.artifact]
        return open_store().put(Path(folder), "evidence", producer=COMMAND, inputs=inputs)


def read_evidence(artifact: ArtifactRef) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """(evidence table, training curve) that `write_evidence` wrote."""
    return figures.read(open_store().open(artifact))
