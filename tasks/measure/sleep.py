"""What a colocated engine's sleep gives back to the trainer, and how long it takes until the engine serves again."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import FlowConfig
from tasks.evaluate.measurement import Measured, MeasureError
from tasks.measure.devices import gpus
from tasks.measure.weights import Weights, random_model

if TYPE_CHECKING:
    from infra.engine.client import EngineClient
    from infra.transport.ipc import IpcSender

GIB = 2**30
LEVELS = (1, 2)
PHASES = ("asleep_s", "wake_weights_s", "update_s", "wake_cache_s", "awake_s")
"""As RL goes through them: asleep, the weights' memory back, new weights in it over ipc, the cache's memory back; and
the last three together, from the trainer's weights to an engine that serves them."""


class SleepOptions(Section):
    size: float | None = Field(None, gt=0)
    """Model of random weights instead of the target, billions of parameters."""
    repeats: int = Field(3, ge=1, le=50)
    """Times that the engine sleeps at each level; figures are medians. One more goes before, to warm up."""


class SleepMeasurement:
    """An idle engine that sleeps, and is woken with new weights, as it is between the steps of colocated RL."""

    help = "Sleep levels 1 and 2 of a colocated engine: memory given back, seconds to sleep, wake, update, serve."
    config = FlowConfig
    options = SleepOptions

    def measure(self, config: FlowConfig, options: SleepOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError without a GPU."""
        from infra.engine.launch import start
        from infra.engine.spec import EngineSpec, Role
        from infra.store.models import resolve

        if not gpus():
            raise MeasureError("an engine on CPU frees nothing when it sleeps: measure on a machine with a GPU")
        with tempfile.TemporaryDirectory() as scratch:
            name, folder, engine_config = config.target.name, None, config.engine
            if options.size is not None:
                folder = random_model(options.size, config.engine.dtype, Path(scratch))
                flags = [*config.engine.extra_flags, "--load-format=dummy"]
                name, engine_config = folder.name, config.engine.model_copy(update={"extra_flags": flags})
            folder = folder or resolve(config.target.source)
            weights = Weights(folder, config.engine.dtype, "cuda")
            say(f"{name}: starting an engine for {weights.nbytes / GIB:.3g} GiB of weights")
            with start(EngineSpec(model=folder, role=Role.rollout, config=engine_config), Path(scratch), say) as engine:
                found = asyncio.run(_sleeps(engine.handle(), weights, options.repeats, say))
        table = [_line(name, weights.nbytes, level, figures) for level, figures in found.items()]
        return Measured(_rows(name, found), table, [_finding(line) for line in table])


async def _sleeps(handle, weights: Weights, repeats: int, say: Callable[[str], None]) -> dict[int, list[dict]]:
    """Figures of every sleep but the first, by level."""
    from infra.engine.client import EngineClient
    from infra.transport.ipc import IpcSender

    found: dict[int, list[dict]] = {level: [] for level in LEVELS}
    version = 0
    async with EngineClient(handle) as client:
        with IpcSender(weights.dtype) as sender:
            for level in LEVELS:
                say(f"sleeping at level {level}, {repeats} times")
                for _ in range(repeats + 1):
                    version += 1
                    found[level].append(await _sleep(client, sender, weights, level, version))
    return {level: figures[1:] for level, figures in found.items()}


async def _sleep(
    client: "EngineClient", sender: "IpcSender", weights: Weights, level: int, version: int
) -> dict[str, float]:
    """Seconds of each phase, and GiB that the GPU has more while the engine sleeps.

    `sync` compares what the engine computes with afterwards with what was sent, parameter by parameter.
    """
    from infra.transport.sync import sync

    before, at = _free_gib(), [time.monotonic()]
    await client.sleep(level)
    at.append(time.monotonic())
    given_back = _free_gib() - before
    weights.change()
    published = sender.publish(version, weights.tensors.items())
    at.append(time.monotonic())
    await client.wake_up(["weights"])
    at.append(time.monotonic())
    report = await sync([client], published)
    at.append(time.monotonic())
    await client.wake_up(["kv_cache"])
    at.append(time.monotonic())
    return {
        "asleep_s": at[1] - at[0],
        "wake_weights_s": at[3] - at[2],
        "update_s": published.publish_s + report.prepare_s + report.pause_s,
        "wake_cache_s": at[5] - at[4],
        "awake_s": published.publish_s + at[5] - at[2],
        "given_back_gib": given_back,
        "left_gib": before + given_back,
    }


def _free_gib() -> float:
    import torch

    return torch.cuda.mem_get_info()[0] / GIB


def _line(name: str, nbytes: int, level: int, figures: list[dict]) -> dict[str, str | float | int | None]:
    medians = {figure: statistics.median(one[figure] for one in figures) for figure in figures[0]}
    return {
        "model": name,
        "level": level,
        "weights, GiB": nbytes / GIB,
        "given back, GiB": medians["given_back_gib"],
        "free then, GiB": medians["left_gib"],
        "sleep, s": medians["asleep_s"],
        "wake weights, s": medians["wake_weights_s"],
        "update, s": medians["update_s"],
        "wake cache, s": medians["wake_cache_s"],
        "awake again, s": medians["awake_s"],
    }


def _rows(name: str, found: dict[int, list[dict]]) -> list[dict]:
    from tasks.evaluate.evidence import row

    rows = []
    for level, figures in found.items():
        about = {"n": len(figures), "domain": f"level {level}/{name}", "subject": "engine"}
        for figure in (*PHASES, "given_back_gib"):
            values = sorted(one[figure] for one in figures)
            unit = "s" if figure in PHASES else "GiB"
            spread = {"low": values[0], "high": values[-1]}
            rows.append(
                row(
                    f"sleep_{figure}",
                    statistics.median(values),
                    unit=unit,
                    **spread,
                    **about,
                )
            )
    return rows


def _finding(line: dict) -> str:
    return (
        f"At level {line['level']} {line['model']} ({line['weights, GiB']:.3g} GiB of weights) gave back "
        f"{line['given back, GiB']:.3g} GiB in {line['sleep, s']:.2f} s, and served the trainer's new weights "
        f"{line['awake again, s']:.2f} s after they were there: waking its weights took {line['wake weights, s']:.2f} "
        f"s, the update {line['update, s']:.2f} s, waking its cache {line['wake cache, s']:.2f} s."
    )


MEASUREMENT = SleepMeasurement()
