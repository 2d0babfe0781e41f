import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluate.fidelity import Scored, compare, divergence, rows

VOCABULARY = 50


def distribution(seed: int, scale: float = 2.0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, scale, VOCABULARY)
    return logits - np.logaddexp.reduce(logits)


def likeliest(logprobs: np.ndarray, k: int) -> dict[int, float]:
    return {int(i): float(logprobs[i]) for i in np.argsort(-logprobs)[:k]}


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((np.exp(p) * (p - q)).sum())


@given(st.integers(0, 10_000), st.integers(1, VOCABULARY - 1), st.integers(1, VOCABULARY - 1))
def test_the_divergence_is_a_lower_bound_and_never_negative(seed, k, other_k):
    p, q = distribution(seed), distribution(seed + 1)
    assert 0 <= divergence(likeliest(p, k), likeliest(q, other_k)) <= kl(p, q) + 1e-5


@given(st.integers(0, 10_000))
def test_with_the_whole_vocabulary_it_is_exact(seed):
    p, q = distribution(seed), distribution(seed + 1, 1.0)
    assert divergence(likeliest(p, VOCABULARY), likeliest(q, VOCABULARY)) == pytest.approx(kl(p, q), abs=1e-6)


def test_the_rest_is_one_bucket():
    p, q = np.log([0.5, 0.3, 0.1, 0.1]), np.log([0.4, 0.3, 0.2, 0.1])
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(1) + 0.2 * math.log(0.2 / 0.3)
    assert divergence(likeliest(p, 2), likeliest(q, 2)) == pytest.approx(expected, abs=1e-12)


def scored(distributions: list[np.ndarray], tokens: list[int], k: int = VOCABULARY) -> Scored:
    logprobs = [float(d[t]) for d, t in zip(distributions, tokens, strict=True)]
    return Scored(logprobs=logprobs, top=[likeliest(d, k) for d in distributions])


def test_rows_weigh_tokens_not_texts_and_match_numpy():
    generator = np.random.default_rng(5)
    base, copy, kls, flips, errors = {}, {}, [], [], []
    for domain, lengths in {"chat": [3, 9, 4], "code": [1, 7]}.items():
        base[domain], copy[domain] = [], []
        for length in lengths:
            ps = [distribution(int(s)) for s in generator.integers(1 << 30, size=length)]
            qs = [p + generator.normal(0, 0.3, VOCABULARY) for p in ps]
            qs = [q - np.logaddexp.reduce(q) for q in qs]
            tokens = [int(t) for t in generator.integers(VOCABULARY, size=length)]
            base[domain].append(scored(ps, tokens))
            copy[domain].append(scored(qs, tokens))
            kls += map(kl, ps, qs)
            flips += [p.argmax() != q.argmax() for p, q in zip(ps, qs, strict=True)]
            errors += [q[t] - p[t] for p, q, t in zip(ps, qs, tokens, strict=True)]
    measured = {(r["figure"], r["domain"]): r for r in rows(base, copy, subject="quant:t/1")}
    assert {domain for _, domain in measured} == {"chat", "code", "all"}
    everything = {figure: r for (figure, domain), r in measured.items() if domain == "all"}
    assert everything["quant_kl"]["value"] == pytest.approx(np.mean(kls), abs=1e-6)
    assert everything["quant_flips"]["value"] == pytest.approx(np.mean(flips))
    assert everything["quant_perplexity_ratio"]["value"] == pytest.approx(math.exp(-np.mean(errors)))
    assert everything["quant_max_error"]["value"] == pytest.approx(np.abs(errors).max())
    for r in everything.values():
        assert r["n"] == 24
        assert math.isnan(r["low"]) or r["low"] <= r["value"] <= r["high"]


def test_a_copy_that_changes_nothing_shows_nothing():
    text = scored([distribution(i) for i in range(5)], [0, 1, 2, 3, 4], k=8)
    same = compare(text, text)
    assert same.kl == [0.0] * 5 and not any(same.flipped) and same.error == [0.0] * 5


def test_views_of_different_texts_are_refused():
    long, short = (scored([distribution(i) for i in range(n)], [0] * n) for n in (3, 2))
    with pytest.raises(ValueError, match="score the same texts"):
        compare(long, short)
