"""Streaming: the capture engine reads the next packs while the trainer learns the last ones, and nothing is kept."""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from infra.engine.spec import EngineHandle
from infra.services.progress import report
from tasks.drafter.answers import Answered
from tasks.drafter.capture import CaptureError, Layout, capture
from tasks.drafter.states_writer import StatesWriter
from tasks.drafter.worker import Progress


def chunks(
    packs: Iterator[list[int]], lengths: Sequence[int], bytes_per_token: int, budget_bytes: int, most: int
) -> Iterator[list[list[int]]]:
    """Up to `most` packs at a time whose sequences, each counted once, take at most `budget_bytes`.

    lengths: tokens of each sequence. Raises CaptureError when a single pack takes more.
    """
    pending: list[list[int]] = []
    for pack in packs:
        size = bytes_per_token * sum(lengths[i] for i in {i for p in [*pending, pack] for i in p})
        if pending and (size > budget_bytes or len(pending) == most):
            yield pending
            pending = []
        alone = bytes_per_token * sum(lengths[i] for i in set(pack))
        if alone > budget_bytes:
            raise CaptureError(
                f"the states of one pack take {alone / 2**20:.0f} MiB, half of the budget is "
                f"{budget_bytes / 2**20:.0f} MiB: raise drafter.capture_budget_gib or lower drafter.micro_batch_tokens"
            )
        pending.append(pack)


def stream(
    handle: EngineHandle,
    consume: Callable[[Path, int], Any],
    wait: Callable[[Any], Progress],
    answers: Sequence[Answered],
    packs: Iterator[list[int]],
    folder: Path,
    *,
    done: int,
    layout: Layout,
    budget_bytes: int,
    concurrency: int,
    every: int,
    steps: int,
) -> Progress:
    """Train to the end, `every` packs at a time; how far it came.

    consume: has the trainer, begun on `answers` and `done` steps ahead, train on the captured states in a folder for so
    many steps, meanwhile; wait: its result. packs: what it trains on in each step.
    folder: for states on their way; two chunks of half the budget lie there at most, one being captured while the other
    is trained on, so capture waits for training.
    """
    training = None
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted attempt left
    lengths = [len(a.token_ids) for a in answers]
    for number, chunk in enumerate(
        chunks(islice(packs, done, None), lengths, layout.bytes_per_token, budget_bytes // 2, every)
    ):
        wanted = [answers[i] for i in sorted({i for pack in chunk for i in pack})]
        here = folder / f"chunk-{number:05d}"
        with StatesWriter(here, layout.layer_ids) as writer:
            asyncio.run(
                capture(
                    handle,
                    wanted,
                    writer,
                    bytes_per_token=layout.bytes_per_token,
                    budget_bytes=budget_bytes // 2,
                    concurrency=concurrency,
                )
            )
        if training is not None:
            at = wait(training)
            report(f"training: loss {at.loss:.3f}, held-out acceptance {at.acceptance:.2f}", at.step, steps)
            if at.finished:
                break
        training = consume(here, len(chunk))
    shutil.rmtree(folder, ignore_errors=True)
    return at
