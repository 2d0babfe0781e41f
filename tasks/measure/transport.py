"""How fast weights reach an engine: every transport, several sizes, beside the plainest copy of the same bytes."""

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from infra.config.base import Section
from infra.config.flows import FlowConfig
from infra.transport.transports import TRANSPORTS
from tasks.evaluate.measurement import Line, Measured, MeasureError, Picture
from tasks.measure.ceilings import Ceiling, ceiling
from tasks.measure.devices import gpus, second_gpu
from tasks.measure.fabric import Fleet, fit, plan
from tasks.measure.ways import Update, Way, updates, ways
from tasks.measure.weights import Weights, random_model, size_of

GB = 1e9
COPIES = 5  # of the weights at once: trainer, published, and in the engine old, new and as its kernels hold them
GPU_COPIES = 4  # on one GPU: trainer, published, and in the engine old and new; cache and activations come on top
PARTS = ("publish_s", "prepare_s", "pause_s", "transfer_s", "finalize_s", "verify_s")


class TransportOptions(Section):
    transports: list[str] = list(TRANSPORTS)
    """Transports to compare."""
    sizes: list[float] = Field([], max_length=8)
    """Models of random weights to move beside the target, billions of parameters."""
    target: bool = True
    """Move the target's own weights."""
    repeats: int = Field(5, ge=1, le=100)
    """Updates of each model; figures are their medians. One more goes before, to warm up."""
    changed: float = Field(0.03, gt=0, lt=1)
    """Share of the values that change from version to version where `store` writes changes: about what an RL step in
    bfloat16 changes at a learning rate of 1e-5. `lockstep measure delta` measures yours."""
    folder: str | None = None
    """Where `store` keeps its versions, a folder or s3://bucket/prefix: the storage to measure. The temporary folder of
    this machine by default."""
    plan: bool = False
    """Size the fabric of a fleet from what was measured; measure at least two --sizes for it."""
    plan_parameters: float = Field(8.0, gt=0)
    """The fleet's model, billions of parameters."""
    plan_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """The fleet's weight type."""
    plan_engines: int = Field(8, ge=1)
    """Engines of the fleet."""
    plan_steps_per_hour: float = Field(60.0, gt=0)
    """RL steps an hour; each ends with an update."""
    plan_wait_share: float = Field(0.05, gt=0, lt=1)
    """Largest share of a step that may be spent on its update."""

    @property
    def fleet(self) -> Fleet:
        return Fleet(
            self.plan_parameters, self.plan_dtype, self.plan_engines, self.plan_steps_per_hour, self.plan_wait_share
        )


class TransportMeasurement:
    """Updates of an idle engine, one after the other."""

    help = "Weight updates by transport and size: pause, transfer and finalize beside a plain copy of the same bytes."
    config = FlowConfig
    options = TransportOptions

    def measure(self, config: FlowConfig, options: TransportOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError when a model does not fit into memory, or no transport can be measured here."""
        from infra.store.models import resolve

        chosen, rows, table = ways(options.transports, options.changed, say), [], []
        with tempfile.TemporaryDirectory() as scratch:
            models = [(config.target.name, resolve(config.target.source), False)] if options.target else []
            for billions in options.sizes:
                folder = random_model(billions, config.engine.dtype, Path(scratch))
                models.append((folder.name, folder, True))
            for name, folder, random in models:
                for line, found in _one_model(name, folder, random, chosen, config, options, Path(scratch), say):
                    say(_said(line))
                    table.append(line)
                    rows += _rows(line, found)
        plan_rows, plan_findings = _plans(table, options.fleet) if options.plan else ([], [])
        return Measured(rows + plan_rows, table, _findings(table) + plan_findings, _pictures(table))


def _one_model(
    name: str,
    folder: Path,
    random: bool,
    chosen: list[Way],
    config: FlowConfig,
    options: TransportOptions,
    scratch: Path,
    say: Callable[[str], None],
) -> Iterator[tuple[dict, list[Update]]]:
    """(line of the table, its updates) of every way."""
    from infra.engine.launch import start
    from infra.engine.spec import EngineSpec, Role
    from infra.transport.base import Reach

    _require_memory(name, size_of(folder, config.engine.dtype))
    weights = Weights(folder, config.engine.dtype, "cuda" if gpus() else "cpu")
    flags = ["--load-format=dummy"] if random else []
    engine_config = config.engine.model_copy(update={"extra_flags": [*config.engine.extra_flags, *flags]})
    spec = EngineSpec(model=folder, role=Role.rollout, config=engine_config)
    place = options.folder or str(scratch)
    for elsewhere in sorted({way.elsewhere for way in chosen}):
        say(f"{name}: starting an engine for {weights.nbytes / GB:.3g} GB of weights")
        with second_gpu() if elsewhere else nullcontext():
            engine = start(spec, scratch, say)
        with engine:
            for way in (way for way in chosen if way.elsewhere == elsewhere):
                say(f"{name}: {options.repeats} updates over {way.name}")
                plain = ceiling(way.transport, weights.nbytes, options.repeats, place)
                found = asyncio.run(updates(engine.handle(), way, weights, options.repeats, Reach(folder=place)))
                yield _line(name, way, weights.nbytes, plain, found), found


def _require_memory(name: str, nbytes: int) -> None:
    if gpus():
        import torch

        # The host's memory is not asked: only some transports take it, and a container may not say what it may have.
        need, free = GPU_COPIES * nbytes, torch.cuda.mem_get_info()[0]
    else:
        need, free = COPIES * nbytes, psutil.virtual_memory().available
    if need > free:
        raise MeasureError(
            f"{name}: {nbytes / GB:.1f} GB of weights take about {need / GB:.1f} GB while they are updated, "
            f"{free / GB:.1f} GB are free: measure smaller --sizes, or set engine.dtype=bfloat16"
        )


def _line(name: str, way: Way, nbytes: int, plain: Ceiling, found: list[Update]) -> dict[str, str | float | int | None]:
    parts = {part: statistics.median(update.part(part) for update in found) for part in PARTS}
    gb = nbytes / GB
    return {
        "model": name,
        "transport": way.name,
        "GB": gb,
        "moved, GB": statistics.median(update.moved for update in found) / GB,
        "whole, s": statistics.median(update.whole_s for update in found),
        **{f"{part.removesuffix('_s')}, s": seconds for part, seconds in parts.items()},
        "transfer, GB/s": gb / parts["transfer_s"],
        "plain, GB/s": gb / plain.seconds,
        "share of plain": plain.seconds / parts["transfer_s"],
        "plain is": plain.what,
    }


def _said(line: dict) -> str:
    """The line in short, while others are measured."""
    return (
        f"{line['model']}, {line['transport']}: {line['whole, s']:.3g} s, pause {line['pause, s']:.3g} s; "
        f"{line['transfer, GB/s']:.3g} GB/s, {line['share of plain']:.0%} of the plainest way"
    )


def _rows(line: dict, found: list[Update]) -> list[dict]:
    from tasks.evaluate import evidence

    about = {
        "n": len(found),
        "domain": f"{line['transport']}/{line['model']}",
        "subject": f"transport:{line['transport']}",
    }
    made = []
    for part in PARTS:
        values = sorted(update.part(part) for update in found)
        spread = {"low": values[0], "high": values[-1]}
        made.append(evidence.row(f"transport_{part}", statistics.median(values), unit="s", **spread, **about))
    for figure, column, unit in (
        ("transport_moved_gb", "moved, GB", "GB"),
        ("transport_gb_per_s", "transfer, GB/s", "GB/s"),
        ("transport_copy_gb_per_s", "plain, GB/s", "GB/s"),
        ("transport_share_of_copy", "share of plain", "share"),
    ):
        made.append(evidence.row(figure, line[column], unit=unit, **about))
    return made


def _findings(table: list[dict]) -> list[str]:
    """A sentence for each transport, on the largest model that it moved."""
    largest = {line["transport"]: line for line in sorted(table, key=lambda line: line["GB"])}
    return [
        f"{name} brought {line['GB']:.3g} GB of {line['model']} up to date at {line['transfer, GB/s']:.3g} GB/s, "
        f"{line['share of plain']:.0%} of the {line['plain, GB/s']:.3g} GB/s of the plainest way ({line['plain is']}); "
        f"{line['whole, s']:.3g} s from the trainer's weights to an engine that serves them, which paused for "
        f"{1e3 * line['pause, s']:.0f} ms of it."
        for name, line in sorted(largest.items(), key=lambda item: item[1]["whole, s"])
    ]


def _plans(table: list[dict], fleet: Fleet) -> tuple[list[dict], list[str]]:
    """Evidence and a sentence for each transport."""
    from tasks.evaluate.evidence import row

    rows, sentences = [], []
    for transport in dict.fromkeys(line["transport"] for line in table):
        lines = [line for line in table if line["transport"] == transport]
        whole = fit([(line["GB"], line["whole, s"]) for line in lines])
        figures, sentence = plan(fleet, transport, whole, fit([(line["GB"], line["pause, s"]) for line in lines]))
        sentences.append(sentence)
        for figure, value in figures.items():
            unit = "share" if "share" in figure else {"gb": "GB", "_s": "s"}.get(figure[-2:], "GB/s")
            unit = "GB/s" if figure.endswith("gb_per_s") else unit
            rows.append(row(figure, value, n=len(lines), unit=unit, domain=transport, subject=f"transport:{transport}"))
    return rows, sentences


def _pictures(table: list[dict]) -> list[Picture]:
    names = list(dict.fromkeys(line["transport"] for line in table))

    def curves(column: str, plain: str = "") -> list[Line]:
        """One for each transport, and for each kind of plain copy."""
        found = [
            Line(name, sorted((line["GB"], line[column]) for line in table if line["transport"] == name))
            for name in names
        ]
        for what in dict.fromkeys(line["plain is"] for line in table) if plain else ():
            points = {line["GB"]: line[plain] for line in table if line["plain is"] == what}
            beside = next(line["transport"] for line in table if line["plain is"] == what)
            found.append(Line(what, sorted(points.items()), beside=beside))
        return found

    several = len({line["GB"] for line in table}) > 1
    return [
        Picture(
            "Bytes into the engine's memory",
            "GB of weights",
            "GB/s",
            curves("transfer, GB/s", "plain, GB/s"),
            log_x=several,
            log_y=True,
        ),
        Picture("Pause of the engine", "GB of weights", "seconds", curves("pause, s"), log_x=several, log_y=True),
        Picture(
            "From the trainer's weights to an engine that serves them",
            "GB of weights",
            "seconds",
            curves("whole, s"),
            log_x=several,
            log_y=True,
        ),
    ]


MEASUREMENT = TransportMeasurement()
