"""Acceptance against an exact count: n-gram speculation can be replayed from what the model says without it."""

import numpy as np
import pytest

from infra.config.target import EngineConfig
from infra.engine.client import EngineClient
from infra.engine.spec import EngineSpec, Role, Speculation
from tasks.evaluate.acceptance import conditions, keep, kept, measure, speedup_row
from tasks.evaluate.identity import identity_rows, read_again

K, NEW = 3, 40
SHORTEST, LONGEST = 2, 4  # n-grams that the engine is started with


@pytest.fixture(scope="module")
def prompts():
    """Random tokens with repetitions, so that proposals are made and some of them fail."""
    generator = np.random.default_rng(4)
    words = generator.integers(1000, 40_000, size=(24, 3))
    return {
        domain: [words[generator.integers(24, size=20)].ravel().tolist() for _ in range(3)] for domain in ("one", "two")
    }


@pytest.fixture(scope="module")
def plain(engine, tiny_qwen3, tiny_engine_config):
    return engine(EngineSpec(model=tiny_qwen3, role=Role.eval, config=tiny_engine_config)).handle()


@pytest.fixture(scope="module")
def speculating(engine, tiny_qwen3, tiny_engine_config):
    ngram = Speculation(method="ngram", num_speculative_tokens=K)
    return engine(EngineSpec(model=tiny_qwen3, role=Role.eval, config=tiny_engine_config, speculation=ngram)).handle()


def replay(prompt: list[int], greedy: list[int]) -> list[tuple[int, int]]:
    """(proposed, accepted) of every target pass that had proposals, until NEW tokens are out; the first token comes
    with the prompt."""
    passes, out = [], 1
    while out < NEW:
        draft = proposal(prompt + greedy[:out])
        follows = greedy[out : out + len(draft)]
        accepted = next((i for i, (d, g) in enumerate(zip(draft, follows, strict=True)) if d != g), len(draft))
        if draft:
            passes.append((len(draft), accepted))
        out += accepted + 1
    return passes


def proposal(tokens: list[int]) -> list[int]:
    """What followed the earliest occurrence of the longest suffix that occurred before."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + K]
    return []


async def continued(handle, prompts, tokens):
    async with EngineClient(handle) as client:
        return [
            (await client.generate(p, max_new_tokens=tokens, temperature=0.0, ignore_eos=True)).token_ids
            for p in prompts
        ]


def test_counters_agree_with_an_exact_count(plain, speculating, prompts, run):
    measurement = run(measure(speculating, prompts, subject="drafter:t/1", max_new_tokens=NEW, concurrency=2))
    figures = {(r["figure"], r["domain"]): r for r in measurement.rows}
    everything = []
    for domain, some in prompts.items():
        passes = [p for prompt, greedy in zip(some, run(continued(plain, some, NEW + K + 1)), strict=True)
                  for p in replay(prompt, greedy)]  # fmt: skip
        everything += passes
        check(figures, domain, passes)
    check(figures, "all", everything)
    accepted = [a for _, a in everything]
    assert 0 < sum(a == 0 for a in accepted) < len(accepted), "the prompts must provoke both hits and misses"


def check(figures, domain, passes):
    n, accepted = len(passes), np.array([a for _, a in passes])
    length = figures["acceptance_length", domain]
    assert (length["n"], length["value"]) == (n, pytest.approx(1 + accepted.mean()))
    half = 1.96 * accepted.std() / n**0.5
    assert (length["low"], length["high"]) == pytest.approx((length["value"] - half, length["value"] + half), abs=1e-3)
    for position in range(1, K + 1):
        rate = figures[f"acceptance_rate_position_{position}", domain]
        assert (rate["n"], rate["value"]) == (n, pytest.approx((accepted >= position).mean()))
        assert rate["low"] <= rate["value"] <= rate["high"]


def test_greedy_output_is_the_same_and_speed_is_reported(plain, speculating, prompts, run, tmp_path):
    asked = dict(subject="drafter:t/1", max_new_tokens=NEW, concurrency=2)
    without = run(measure(plain, prompts, **asked, suffix="_plain"))
    again = run(measure(plain, prompts, **asked))
    spoken = run(measure(speculating, prompts, **asked, prefix="quant_"))
    rows = identity_rows(without.outputs, spoken.outputs, again=again.outputs, subject="drafter:t/1")
    noise = {"output_identity_noise", "output_identity_difference"}
    assert {r["figure"] for r in rows} == {"output_identity", "output_agreement", *noise}
    expected = {"output_identity_difference": 0.0}
    assert all((r["value"], r["n"]) == (expected.get(r["figure"], 1.0), 6 if r["domain"] == "all" else 3) for r in rows)
    read = run(read_again(plain, prompts, without.outputs, concurrency=2))
    assert read == without.outputs  # in float32 rounding turns no token
    assert not any("acceptance" in r["figure"] for r in without.rows)  # nothing was proposed
    figures = {r["figure"]: r for r in without.rows if r["domain"] == "all"}
    assert set(figures) == {
        f"{f}_plain" for f in ("tokens_per_second", "looped_share", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
    }
    tokens = sum(len(o) for outputs in without.outputs.values() for o in outputs)
    assert figures["tokens_per_second_plain"]["n"] == tokens
    assert 0 < figures["itl_p50_plain"]["n"] <= tokens - 6  # tokens that wait for the reader arrive together
    assert (
        figures["ttft_p50_plain"]["n"] == 6
        and 0 < figures["itl_p50_plain"]["value"] <= figures["itl_p99_plain"]["value"]
    )
    assert any(r["figure"] == "quant_acceptance_length_without_loops" for r in spoken.rows)
    gaps = {r["figure"]: r["n"] for r in spoken.rows if r["domain"] == "all"}["quant_itl_p50"]
    assert gaps < tokens - 6  # tokens accepted together arrive together
    assert speedup_row(spoken, without, subject="drafter:t/1")["value"] == pytest.approx(
        spoken.tokens_per_second / without.tokens_per_second
    )
    keep(without, tmp_path)
    found = kept(tmp_path, conditions(prompts, max_new_tokens=NEW, concurrency=2))
    assert found.model_dump_json() == without.model_dump_json() and "NaN" in found.model_dump_json()
    assert kept(tmp_path, conditions(prompts, max_new_tokens=NEW, concurrency=3)) is None
    assert kept(tmp_path, conditions(prompts, max_new_tokens=NEW, concurrency=2, engine=EngineConfig())) is None
    assert kept(tmp_path / "elsewhere", without.conditions) is None
