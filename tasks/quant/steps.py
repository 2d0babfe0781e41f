"""The steps of quantizing. Arguments and results are JSON, so that a finished step is not done again."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from infra.cluster.session import session
from infra.config.flows import QuantizeFlowConfig
from infra.config.quant import QuantizeConfig
from infra.config.target import EngineConfig, TargetConfig
from infra.engine.drafters import speculation
from infra.engine.pin import engine_pin, hardware
from infra.engine.spec import EngineHandle, EngineSpec, Role, Speculation
from infra.lineage.lineage import Lineage
from infra.lineage.source import base_version
from infra.lineage.versions import Version
from infra.services.home import home
from infra.services.prefect import durable
from infra.services.progress import report
from infra.services.spans import Spans
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.evaluate import acceptance, evidence
from tasks.evaluate.acceptance import Measurement
from tasks.evaluate.benchmarks import benchmark
from tasks.evaluate.problems import Problem
from tasks.evaluate.questions import Answer
from tasks.quant import figures, view
from tasks.quant.quantizers import quantizer
from tasks.quant.schemes import check, local_device
from tasks.quant.size import served_bytes

if TYPE_CHECKING:
    import pandas as pd

COMMAND = "lockstep quantize"
TABLE = "evidence.parquet"
Prompts = dict[str, list[list[int]]]


class Chosen(BaseModel):
    """What is quantized, and the drafter that is tried on the quant."""

    model_config = ConfigDict(frozen=True)

    target: Version
    drafter: Version | None


class Made(BaseModel):
    """An artifact that a step made, and where its seconds went."""

    model_config = ConfigDict(frozen=True)

    artifact: ArtifactRef
    spans: dict[str, float]


class Looked(Made):
    """A view, and what the model wrote to the held-out problems."""

    written: list[str]


class Tried(BaseModel):
    """What a drafter did on the quant, also at each of `drafter.load_concurrency`, and where the seconds went."""

    measurement: Measurement
    load: list[Measurement]
    spans: dict[str, float]


@durable(name="choose what is quantized", outlives_edits=True)
def choose(config: TargetConfig, target: str | None, drafter: str | None, run: str) -> Chosen:
    """The target and drafter given as labels, else the target that `config` means and its newest drafter. Kept with
    the run: there may be newer ones when it resumes."""
    lineage = Lineage()
    version = lineage.get(target) if target else base_version(lineage, open_store(), config)
    drafters = lineage.drafters(version)
    return Chosen(target=version, drafter=lineage.get(drafter) if drafter else next(iter(drafters), None))


@durable(name="check the scheme")
def check_scheme(config: TargetConfig, quantization: QuantizeConfig, dtype: str, run: str) -> str:
    """The scheme's name, once the version that `config` means can be quantized by it, here: a loop asks this before it
    trains for hours.

    Raises SchemeError or BenchmarkError as `quantize_weights` would.
    """
    store = open_store()
    return _checked(store.open(base_version(Lineage(), store, config).artifact), quantization, dtype)


@durable(name="quantize weights", pools=["trainer"])
def quantize_weights(target: ArtifactRef, config: QuantizeConfig, texts: list[list[int]], dtype: str) -> Made:
    """The quantized copy of `target` in the store. texts: token ids that a recipe is calibrated on.

    Raises SchemeError before any work when the model or this machine's engine, with activations of `dtype`, cannot use
    the scheme, BenchmarkError when one of `config.tasks` does not exist.
    """
    store, spans = open_store(), Spans()
    model = store.open(target)
    _checked(model, config, dtype)
    home().mkdir(parents=True, exist_ok=True)  # beside the store, which then shares the files instead of copying them
    with tempfile.TemporaryDirectory(prefix="quantize-", dir=home()) as folder, spans.measure("quantize"):
        report(f"quantizing to {config.scheme} by {config.recipe}")
        quantizer(config)(model, config, texts, Path(folder))
        producer = f"{COMMAND} {config.scheme} {config.recipe}"
        artifact = store.put(Path(folder), "quant", producer=producer, inputs=[target])
    return Made(artifact=artifact, spans=spans.seconds)


@durable(name="look at base", pools=["engines"])
def look_at_base(
    target: Version,
    drafter: Version | None,
    prompts: Prompts,
    held_out: list[Problem],
    config: QuantizeFlowConfig,
    run: str,
) -> Looked:
    """What the target answers, how likely it finds that, and how it does on the questions and the RL environments'
    held-out problems. What the evidence about it and `drafter` holds already is taken from there."""
    tables = [*target.evidence, *(drafter.evidence if drafter else [])]
    known = view.known(map(open_store().open, tables), prompts, config)
    return _look(target, prompts, held_out, None, config, known)


@durable(name="look at quant", pools=["engines"])
def look_at_quant(
    quant: Version,
    prompts: Prompts,
    held_out: list[Problem],
    base: ArtifactRef,
    config: QuantizeFlowConfig,
    run: str,
) -> Looked:
    """The same of the quant, on the answers of the base that `look_at_base` kept."""
    return _look(quant, prompts, held_out, base, config, view.Known())


def answered(look: ArtifactRef) -> Measurement:
    """How the model of a view answered the prompts, without speculation."""
    return view.View.read(open_store().open(look)).speed


@durable(name="try drafter on quant", pools=["engines"])
def try_drafter(quant: Version, drafter: Version, prompts: Prompts, config: QuantizeFlowConfig, run: str) -> Tried:
    """Acceptance and speed of the target's drafter when it proposes for the quant."""
    store, spans = open_store(), Spans()
    proposing = speculation(store.open(drafter.artifact), config.drafter.num_speculative_tokens)
    spec = _spec(store.open(quant.artifact), config.engine, proposing)
    with _serve(spec, spans) as handle, spans.measure("engine"):
        report(f"measuring {drafter.label} on {quant.label}")
        measurement, load = view.speculate(handle, prompts, config, quant.subject)
    report(f"{drafter.label} on {quant.label}: {acceptance.told(measurement)}")
    return Tried(measurement=measurement, load=load, spans=spans.seconds)


@durable(name="write evidence")
def write_evidence(
    target: Version,
    quant: Version,
    base: ArtifactRef,
    copy: ArtifactRef,
    drafter: Version | None,
    drafted: list[Measurement],
    load: list[Measurement],
    rewarded: tuple[list[Answer], list[Answer]],
    prompts: Prompts,
    config: QuantizeFlowConfig,
) -> ArtifactRef:
    """The evidence table about the quant in the store, from the views of its base and of itself, and what that says of
    the base alone. drafter: that was tried on it; drafted: the quant with it, as it is and retrained, as far as there
    are; load: with it as it is, at each of `drafter.load_concurrency`. rewarded: scored answers of base and
    quant to the held-out problems."""
    store = open_store()
    rows = figures.rows(
        view.View.read(store.open(base)),
        view.View.read(store.open(copy)),
        drafted,
        load=load,
        rewarded=rewarded,
        drafter=drafter.version if drafter else None,
        config=config.quantize,
        sizes=tuple(served_bytes(store.open(v.artifact), config.engine.dtype) for v in (target, quant)),
        prompts=prompts,
        subject=quant.subject,
        concurrency=config.drafter.eval_concurrency,
    )
    rows += figures.of_base(rows, target.subject)
    with tempfile.TemporaryDirectory() as folder:
        table = evidence.table(rows, engine=engine_pin(), hardware=hardware(), command=COMMAND)
        evidence.write(table, Path(folder) / TABLE)
        return store.put(Path(folder), "evidence", producer=COMMAND, inputs=[target.artifact, quant.artifact])


def read_evidence(artifact: ArtifactRef) -> "pd.DataFrame":
    """The table that `write_evidence` wrote."""
    return evidence.read(open_store().open(artifact) / TABLE)


def _checked(model: Path, config: QuantizeConfig, dtype: str) -> str:
    for name in config.tasks:
        benchmark(name)
    quantizer(config)
    return check(config, model, local_device(), dtype).name


def _look(
    version: Version,
    prompts: Prompts,
    held_out: list[Problem],
    base: ArtifactRef | None,
    config: QuantizeFlowConfig,
    known: view.Known,
) -> Looked:
    store, spans = open_store(), Spans()
    model = store.open(version.artifact)
    answered = view.View.read(store.open(base)).speed if base else None
    with _serve(_spec(model, config.engine), spans) as handle, spans.measure("engine"):
        seen = view.look(handle, model, prompts, held_out, answered, config, version.subject, known)
    with tempfile.TemporaryDirectory() as folder:
        seen.write(Path(folder))
        artifact = store.put(Path(folder), "view", producer=COMMAND, inputs=[version.artifact])
    return Looked(artifact=artifact, written=seen.written, spans=spans.seconds)


def _spec(model: Path, engine: EngineConfig, speculation: Speculation | None = None) -> EngineSpec:
    return EngineSpec(model=model, role=Role.eval, config=engine, speculation=speculation)


@contextmanager
def _serve(spec: EngineSpec, spans: Spans) -> Iterator[EngineHandle]:
    with ExitStack() as stack:
        with spans.measure("engine_start"):
            handle = stack.enter_context(session().engine(spec, progress=report))
        yield handle
