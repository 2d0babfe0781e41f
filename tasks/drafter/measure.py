"""How fast hidden states are captured, beside reading the same tokens without, and how fast a head learns from the
target's answers, beside speculators' own trainer."""

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import DrafterFlowConfig
from tasks.drafter.measure_engines import answering_and_capturing, asked, captured, engines
from tasks.evaluate.measurement import Measured

if TYPE_CHECKING:
    from infra.engine.spec import EngineHandle
    from tasks.drafter.answers import Answered
    from tasks.drafter.measure_training import Training
    from tasks.drafter.traffic import Traffic

FIRST_ID = 100  # of the random tokens: special ones come before


class DrafterOptions(Section):
    sequences: int = Field(48, ge=4)
    """Sequences of random tokens that are read and captured."""
    tokens: int = Field(256, ge=16)
    """Tokens of each; the second half counts as answer."""
    prompts: int = Field(8, ge=2)
    """Prompts of each domain of `drafter.traffic` whose answers are learned from; sources that need a run are left
    out."""
    steps: int = Field(30, ge=3)
    """Training steps of each trainer; the first tenth, two at least, is not timed."""
    served: bool = False
    """Serve the head trained here and the one that speculators trained, on `drafter.eval_prompts` other prompts of each
    domain."""


class DrafterMeasurement:
    """Reading, answering, capturing, training, one after the other."""

    help = "Capture beside plain reading of the same tokens; training of a head beside speculators' own trainer."
    config = DrafterFlowConfig
    options = DrafterOptions

    def measure(self, config: DrafterFlowConfig, options: DrafterOptions, say: Callable[[str], None]) -> Measured:
        """Raises EngineError when an engine does not start, MeasureError when no source of traffic can be used."""
        import torch

        from infra.store.models import resolve
        from tasks.drafter import heads, measure_training
        from tasks.drafter.answers import answer
        from tasks.drafter.capture import layer_bytes
        from tasks.drafter.contract import captured_layers
        from tasks.drafter.states_writer import StatesWriter

        target, concurrency = resolve(config.target.source), config.engine.max_concurrent_sequences
        prompts, answering = asked(
            target, config, options.prompts, held_out=config.drafter.eval_prompts if options.served else 0
        )
        layer_ids = captured_layers(target)
        size = layer_bytes(target, len(layer_ids), config.engine.dtype)
        torch.set_num_threads(config.cluster.trainer_threads)
        with tempfile.TemporaryDirectory() as scratch:
            here = Path(scratch)
            specs = answering_and_capturing(target, config, layer_ids, here)
            say("starting an engine that reads and one that captures")
            # The trainer's imports take as long as an engine's start.
            with engines(specs, here, say, meanwhile=heads.warm_up) as (reader, capturer):
                warm, timed = (random_sequences(target, options, seed) for seed in (1, 2))
                _read(reader.handle(), warm, concurrency)
                plain = _read(reader.handle(), timed, concurrency)
                say(f"read {plain:.0f} tokens/s; answering {len(prompts.train)} prompts")
                answers = asyncio.run(answer(reader.handle(), prompts.train, answering))
                reader.stop()
                speed, read = {}, {"warm": plain, "timed": plain}
                for name, sequences in (("warm", warm), ("timed", timed), ("answers", answers)):
                    if name not in read:  # whoever answered has these cached, the engine that captures caches nothing
                        read[name] = _read(capturer.handle(), sequences, concurrency)
                        say(f"read {read[name]:.0f} tokens/s ({name}, by the engine that captures)")
                    with StatesWriter(here / name, layer_ids) as writer:
                        speed[name] = captured(capturer.handle(), sequences, writer, size, concurrency)
                    say(f"captured {speed[name]:.0f} tokens/s ({name}), {speed[name] / read[name]:.0%} of reading")
                    if name != "answers":
                        shutil.rmtree(here / name)
            training = measure_training.compare(
                target, here / "answers", config.drafter, options.steps, here, say, config.engine.dtype
            )
            if options.served:
                training = _served(target, training, prompts, config, here, say)
        lengths = {name: [len(s.token_ids) for s in these] for name, these in (("timed", timed), ("answers", answers))}
        return _measured(config.target.name, lengths, read, speed, training, size)


def _served(
    target: Path,
    training: "Training",
    prompts: "Traffic",
    config: DrafterFlowConfig,
    here: Path,
    say: Callable[[str], None],
) -> "Training":
    """`training` with what an engine accepts of the head trained here and of speculators' own."""
    from infra.engine.drafters import speculation
    from infra.engine.spec import EngineSpec, Role
    from tasks.drafter.measure_training import HERE, THEIRS
    from tasks.evaluate.acceptance import measure

    settings, by, names = config.drafter, dict(training.by), (HERE, THEIRS)
    proposing = [speculation(by[name].head, settings.num_speculative_tokens) for name in names]
    specs = [EngineSpec(model=target, role=Role.eval, config=config.engine, speculation=one) for one in proposing]
    held_out = {"all": [p.token_ids for p in prompts.held_out]}
    say("serving both heads")
    with engines(specs, here, say) as running:
        for name, engine in zip(names, running, strict=True):
            labels = dict(subject=name, max_new_tokens=settings.max_new_tokens, concurrency=settings.eval_concurrency)
            measured = asyncio.run(measure(engine.handle(), held_out, **labels))
            (found,) = (row for row in measured.rows if row["figure"] == "acceptance_length")
            by[name] = replace(by[name], served=found["value"], drafts=found["n"])
            say(f"{name}: an engine accepts {found['value']:.3f} tokens a pass")
    return replace(training, by=by)


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
    from tasks.drafter.pace import Pace

    async def read() -> float:
        pace = Pace(concurrency)

        async def one(client: EngineClient, token_ids: list[int]) -> None:
            async with pace.request(len(token_ids)):
                await client.generate(token_ids, max_new_tokens=1, temperature=0.0, ignore_eos=True, logprobs=False)

        async with EngineClient(handle) as client:
            begun = time.monotonic()
            await asyncio.gather(*(one(client, s.token_ids) for s in sequences))
            return sum(len(s.token_ids) for s in sequences) / (time.monotonic() - begun)

    return asyncio.run(read())


def _measured(
    name: str,
    lengths: dict[str, list[int]],
    read: dict[str, float],
    speed: dict[str, float],
    training: "Training",
    size: int,
) -> Measured:
    """lengths: tokens of each sequence, of the `timed` ones and of the `answers`. read: tokens/s without
    capture, of the answers by the engine that captures. speed: with capture. size: bytes of a token's states."""
    from tasks.drafter import measure_training
    from tasks.evaluate.evidence import row

    subject = f"target:{name}"
    rows, table, findings = [], [], []
    for key, prefix, what in (("timed", "", "random sequences"), ("answers", "answers_", "answers")):
        n, plain, captured = sum(lengths[key]), read[key], speed[key]
        rows += [
            row(f"{prefix}prefill_tokens_per_second", plain, n=n, unit="tokens/s", subject=subject),
            row(f"{prefix}capture_tokens_per_second", captured, n=n, unit="tokens/s", subject=subject),
            row(f"{prefix}capture_share_of_prefill", captured / plain, n=n, unit="ratio", subject=subject),
        ]
        table += [
            _line(f"reading {what}", plain),
            _line(f"capturing {what}", captured, megabytes=captured * size / 1e6),
        ]
        each = n / len(lengths[key])
        findings.append(
            f"Capture of {len(lengths[key])} {what} ({each:.0f} tokens each, {size} bytes a token) runs at "
            f"{captured:.0f} tokens/s, {captured / plain:.0%} of plain reading."
        )
    rows += [
        row("hidden_states_bytes_per_token", size, n=sum(lengths["timed"]), unit="bytes", subject=subject),
        *measure_training.rows(training, subject),
    ]
    table += [
        _line(by, one.tokens_per_second, tokens=one.tokens, acceptance=one.acceptance, served=one.served)
        for by, one in training.by.items()
    ]
    return Measured(rows, table, findings + measure_training.findings(training))


def _line(
    work: str,
    speed: float,
    megabytes: float | None = None,
    tokens: int | None = None,
    acceptance: float | None = None,
    served: float | None = None,
) -> dict[str, str | float | int | None]:
    return {
        "work": work,
        "tokens/s": speed,
        "MB/s": megabytes,
        "tokens trained on": tokens,
        "held-out acceptance": acceptance,
        "served acceptance": served,
    }


MEASUREMENT = DrafterMeasurement()
