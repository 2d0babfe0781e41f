"""How fast hidden states are captured, beside reading the same tokens without, and how fast a head learns of them."""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import DrafterFlowConfig
from tasks.evaluate.measurement import Measured

if TYPE_CHECKING:
    from infra.engine.spec import EngineHandle
    from tasks.drafter.answers import Answered

FIRST_ID = 100  # of the random tokens: special ones come before


class DrafterOptions(Section):
    sequences: int = Field(48, ge=4)
    """Sequences of random tokens that are read and learned from."""
    tokens: int = Field(256, ge=16)
    """Tokens of each; the second half counts as answer."""
    steps: int = Field(12, ge=2)
    """Training steps that are timed, after two that are not."""


class DrafterMeasurement:
    """Reading, capturing, training, one after the other."""

    help = "Capture of hidden states beside plain reading of the same tokens, and training of a head, in tokens/s."
    config = DrafterFlowConfig
    options = DrafterOptions

    def measure(self, config: DrafterFlowConfig, options: DrafterOptions, say: Callable[[str], None]) -> Measured:
        """Raises EngineError when an engine does not start."""
        from infra.engine.launch import start
        from infra.engine.spec import Capture, EngineSpec, Role
        from infra.store.models import resolve
        from tasks.drafter.capture import layer_bytes
        from tasks.drafter.contract import captured_layers
        from tasks.drafter.states import StatesWriter

        target, concurrency = resolve(config.target.source), config.engine.max_concurrent_sequences
        layer_ids = captured_layers(target)
        size = layer_bytes(target, len(layer_ids), config.engine.dtype)
        with tempfile.TemporaryDirectory() as scratch:
            here = Path(scratch)
            say("starting an engine that reads")
            with start(EngineSpec(model=target, role=Role.eval, config=config.engine), here, say) as engine:
                _read(engine.handle(), random_sequences(target, options, seed=1), concurrency)
                plain = _read(engine.handle(), random_sequences(target, options, seed=2), concurrency)
            capturing = Capture(layer_ids=layer_ids, folder=here / "staging")
            spec = EngineSpec(model=target, role=Role.capture, config=config.engine, capture=capturing)
            say("starting an engine that captures")
            with start(spec, here, say) as engine:
                for seed, name in ((1, "warm"), (2, "states")):
                    with StatesWriter(here / name, layer_ids) as writer:
                        sequences = random_sequences(target, options, seed)
                        captured = _capture(engine.handle(), sequences, writer, size, concurrency)
            say(f"training for {options.steps} steps")
            learned = _train(target, here / "states", config, options.steps)
        return _measured(config.target.name, options, plain, captured, learned, size)


def random_sequences(target: Path, options: DrafterOptions, seed: int) -> "list[Answered]":
    """Sequences that share no prefix, so that nothing comes from a cache."""
    from transformers import AutoConfig

    from tasks.drafter.answers import Answered

    rng, vocab = random.Random(seed), AutoConfig.from_pretrained(target).get_text_config().vocab_size
    return [
        Answered(
            key=f"{seed}-{i}",
            domain="random",
            token_ids=[rng.randrange(FIRST_ID, vocab) for _ in range(options.tokens)],
            answers=[(options.tokens // 2, options.tokens)],
            finish_reason="length",
        )
        for i in range(options.sequences)
    ]


def _read(handle: "EngineHandle", sequences: "list[Answered]", concurrency: int) -> float:
    """Tokens per second."""
    from infra.engine.client import EngineClient

    async def read() -> float:
        slots = asyncio.Semaphore(concurrency)

        async def one(client: EngineClient, token_ids: list[int]) -> None:
            async with slots:
                await client.generate(token_ids, max_new_tokens=1, temperature=0.0, ignore_eos=True)

        async with EngineClient(handle) as client:
            begun = time.monotonic()
            await asyncio.gather(*(one(client, s.token_ids) for s in sequences))
            return sum(len(s.token_ids) for s in sequences) / (time.monotonic() - begun)

    return asyncio.run(read())


def _capture(handle: "EngineHandle", sequences: "list[Answered]", writer, size: int, concurrency: int) -> float:
    """Tokens per second, written to disk with their checksums."""
    from tasks.drafter.capture import capture

    begun = time.monotonic()
    asyncio.run(capture(handle, sequences, writer, bytes_per_token=size, budget_bytes=2**40, concurrency=concurrency))
    writer.close_shard()
    return sum(len(s.token_ids) for s in sequences) / (time.monotonic() - begun)


def _train(target: Path, states: Path, config: DrafterFlowConfig, steps: int) -> float:
    """Rows per second, looks at held-out acceptance left out."""
    from tasks.drafter.train import HeadTrainer

    trainer = HeadTrainer(target, states, config.drafter)
    for _ in range(2):
        trainer.step(trainer.batch(next(trainer.packs)), config.drafter.lr)
    before, begun = trainer.tokens, time.monotonic()
    for _ in range(steps):
        trainer.step(trainer.batch(next(trainer.packs)), config.drafter.lr)
    return (trainer.tokens - before) / (time.monotonic() - begun)


def _measured(name: str, options: DrafterOptions, plain: float, captured: float, learned: float, size: int) -> Measured:
    from tasks.evaluate.evidence import row

    n, subject = options.sequences * options.tokens, f"target:{name}"
    rows = [
        row("prefill_tokens_per_second", plain, n=n, unit="tokens/s", subject=subject),
        row("capture_tokens_per_second", captured, n=n, unit="tokens/s", subject=subject),
        row("capture_share_of_prefill", captured / plain, n=n, unit="ratio", subject=subject),
        row("hidden_states_bytes_per_token", size, n=n, unit="bytes", subject=subject),
        row("training_tokens_per_second", learned, n=options.steps, unit="tokens/s", subject=subject),
    ]
    table = [
        {"work": "reading", "tokens/s": plain, "MB/s": None},
        {"work": "capturing", "tokens/s": captured, "MB/s": captured * size / 1e6},
        {"work": "training", "tokens/s": learned, "MB/s": None},
    ]
    findings = [
        f"Capture of {size} bytes a token runs at {captured:.0f} tokens/s, {captured / plain:.0%} of plain reading.",
        f"An EAGLE-3 head trains on {learned:.0f} tokens/s.",
    ]
    return Measured(rows, table, findings)


MEASUREMENT = DrafterMeasurement()
