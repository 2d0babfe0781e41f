"""Acceptance and speed at several numbers of requests in flight."""

import math
from collections.abc import Mapping, Sequence

from infra.engine.spec import EngineHandle
from infra.services.progress import report
from tasks.evaluate.acceptance import Measurement, measure
from tasks.evaluate.evidence import LOAD


async def measure_under_load(
    handle: EngineHandle,
    prompts_by_domain: Mapping[str, Sequence[Sequence[int]]],
    concurrency: Sequence[int],
    *,
    prefix: str = "",
    **labels,
) -> list[Measurement]:
    """For each of `concurrency` the prompts of all domains together (domain `all`), asked again until there are twice
    as many requests as are in flight. Figures begin with `load_`, then `prefix`; labels: other arguments of `measure`.
    """
    prompts, measured = [ids for some in prompts_by_domain.values() for ids in some], []
    for at_once in concurrency:
        report(f"measuring with {at_once} requests in flight")
        times = max(1, math.ceil(2 * at_once / len(prompts)))
        asked = {"all": prompts * times}
        measured.append(await measure(handle, asked, concurrency=at_once, prefix=f"{LOAD}{prefix}", **labels))
    return measured
