"""How fast weights reach an engine: every transport, several sizes, beside the plainest copy of the same bytes."""

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from pydantic import Field

from infra.config.base import Section
from infra.config.flows import FlowConfig
from infra.transport.transports import TRANSPORTS
from tasks.evaluate.measurement import Line, Measured, MeasureError, Picture
from tasks.measure.fabric import Fleet, fit, plan
from tasks.measure.weights import Weights, ceiling_s, random_model

if TYPE_CHECKING:
    from infra.engine.spec import EngineHandle
    from infra.transport.sync import SyncReport

GB = 1e9
COPIES = 5  # of the weights at once: trainer, published, and in the engine old, new and as its kernels hold them
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
        """Raises MeasureError when a model does not fit into memory."""
        from infra.store.models import resolve

        rows, table = [], []
        with tempfile.TemporaryDirectory() as scratch:
            models = [(config.target.name, resolve(config.target.source), False)] if options.target else []
            for billions in options.sizes:
                folder = random_model(billions, config.engine.dtype, Path(scratch))
                models.append((folder.name, folder, True))
            for name, folder, random in models:
                for transport, line, found in self._one_model(
                    name, folder, random, config, options, Path(scratch), say
                ):
                    table.append(line)
                    rows += _rows(transport, name, line, found)
        plan_rows, plan_findings = _plans(table, options.fleet) if options.plan else ([], [])
        return Measured(rows + plan_rows, table, _findings(table) + plan_findings, _pictures(table))

    def _one_model(
        self,
        name: str,
        folder: Path,
        random: bool,
        config: FlowConfig,
        options: TransportOptions,
        scratch: Path,
        say: Callable[[str], None],
    ):
        """(transport, line of the table, reports of its updates) of every transport."""
        from infra.engine.launch import start
        from infra.engine.spec import EngineSpec, Role

        weights = Weights(folder, config.engine.dtype)
        _require_memory(name, weights.nbytes)
        flags = ["--load-format=dummy"] if random else []
        engine_config = config.engine.model_copy(update={"extra_flags": [*config.engine.extra_flags, *flags]})
        spec = EngineSpec(model=folder, role=Role.rollout, config=engine_config)
        say(f"{name}: starting an engine for {weights.nbytes / GB:.3g} GB of weights")
        with start(spec, scratch, say) as engine:
            for transport in options.transports:
                say(f"{name}: {options.repeats} updates over {transport}")
                copy_s = ceiling_s(weights.nbytes, options.repeats)
                found = asyncio.run(_updates(engine.handle(), transport, weights, options.repeats, scratch))
                yield transport, _line(name, transport, weights, copy_s, found), found


async def _updates(
    handle: "EngineHandle", transport: str, weights: Weights, repeats: int, folder: Path
) -> list[tuple[float, "SyncReport"]]:
    """(seconds to publish, report) of each update but the first."""
    from infra.engine.client import EngineClient
    from infra.transport.base import Reach
    from infra.transport.sync import sync
    from infra.transport.transports import make_sender

    found = []
    async with EngineClient(handle) as client:
        with make_sender(transport, weights.dtype, Reach(folder=folder)) as sender:
            for version in range(1, repeats + 2):
                weights.change()
                published = sender.publish(version, weights.tensors.items())
                found.append((published.publish_s, await sync([client], published)))
    return found[1:]


def _require_memory(name: str, nbytes: int) -> None:
    need, free = COPIES * nbytes, psutil.virtual_memory().available
    if need > free:
        raise MeasureError(
            f"{name}: {nbytes / GB:.1f} GB of weights take about {need / GB:.1f} GB while they are updated, "
            f"{free / GB:.1f} GB are free: measure smaller --sizes, or set engine.dtype=bfloat16"
        )


def _line(
    name: str, transport: str, weights: Weights, copy_s: float, found: list[tuple[float, "SyncReport"]]
) -> dict[str, str | float | int | None]:
    parts = {part: statistics.median(_part(part, *update) for update in found) for part in PARTS}
    return {
        "model": name,
        "transport": transport,
        "GB": weights.nbytes / GB,
        **{f"{part.removesuffix('_s')}, s": seconds for part, seconds in parts.items()},
        "transfer, GB/s": weights.nbytes / GB / parts["transfer_s"],
        "plain copy, GB/s": weights.nbytes / GB / copy_s,
        "share of the copy": copy_s / parts["transfer_s"],
    }


def _part(part: str, publish_s: float, report: "SyncReport") -> float:
    return publish_s if part == "publish_s" else getattr(report, part)


def _rows(transport: str, name: str, line: dict, found: list[tuple[float, "SyncReport"]]) -> list[dict]:
    from tasks.evaluate import evidence

    subject, n = f"transport:{transport}", len(found)
    made = []
    for part in PARTS:
        values = sorted(_part(part, *update) for update in found)
        figure = f"transport_{part}"
        made.append(
            evidence.row(
                figure,
                statistics.median(values),
                low=values[0],
                high=values[-1],
                n=n,
                unit="s",
                domain=f"{transport}/{name}",
                subject=subject,
            )
        )
    for figure, column in (
        ("transport_gb_per_s", "transfer, GB/s"),
        ("transport_copy_gb_per_s", "plain copy, GB/s"),
        ("transport_share_of_copy", "share of the copy"),
    ):
        unit = "share" if column.startswith("share") else "GB/s"
        made.append(evidence.row(figure, line[column], n=n, unit=unit, domain=f"{transport}/{name}", subject=subject))
    return made


def _findings(table: list[dict]) -> list[str]:
    return [
        f"{line['transport']} moved {line['GB']:.3g} GB of {line['model']} at {line['transfer, GB/s']:.3g} GB/s, "
        f"{line['share of the copy']:.0%} of a plain copy's {line['plain copy, GB/s']:.3g} GB/s; "
        f"the engine paused for {1e3 * line['pause, s']:.0f} ms."
        for line in table
    ]


def _plans(table: list[dict], fleet: Fleet) -> tuple[list[dict], list[str]]:
    """Evidence and a sentence for each transport."""
    from tasks.evaluate.evidence import row

    rows, sentences = [], []
    for transport in dict.fromkeys(line["transport"] for line in table):
        lines = [line for line in table if line["transport"] == transport]
        whole = [(line["GB"], line["publish, s"] + line["prepare, s"] + line["pause, s"]) for line in lines]
        figures, sentence = plan(fleet, transport, fit(whole), fit([(line["GB"], line["pause, s"]) for line in lines]))
        sentences.append(sentence)
        for figure, value in figures.items():
            unit = "share" if "share" in figure else {"gb": "GB", "_s": "s"}.get(figure[-2:], "GB/s")
            unit = "GB/s" if figure.endswith("gb_per_s") else unit
            rows.append(row(figure, value, n=len(lines), unit=unit, domain=transport, subject=f"transport:{transport}"))
    return rows, sentences


def _pictures(table: list[dict]) -> list[Picture]:
    transports = list(dict.fromkeys(line["transport"] for line in table))

    def curves(column: str) -> list[Line]:
        return [
            Line(t, sorted((line["GB"], line[column]) for line in table if line["transport"] == t)) for t in transports
        ]

    copies = sorted({(line["GB"], line["plain copy, GB/s"]) for line in table})
    return [
        Picture(
            "Bytes into the engine's memory",
            "GB of weights",
            "GB/s",
            [*curves("transfer, GB/s"), Line("plain copy", copies)],
            log_x=len(copies) > 1,
            log_y=True,
        ),
        Picture("Pause of the engine", "GB of weights", "seconds", curves("pause, s"), log_x=len(copies) > 1),
    ]


MEASUREMENT = TransportMeasurement()
