"""Advantages, corrections, losses and mismatch figures against float64 values of verl 0.9.1 (golden/make_rl.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.config.rl import MismatchBounds
from tasks.rl.advantages import ESTIMATORS, advantages
from tasks.rl.corrections import CORRECTIONS, Mismatch
from tasks.rl.flat import Flat
from tasks.rl.losses import LOSSES, Clip, Tokens, k3, summed
from tasks.rl.mismatch import Watch, mismatch

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rl.json").read_text())
SETTINGS = GOLDEN["settings"]
CLIP = Clip(SETTINGS["clip_low"], SETTINGS["clip_high"], SETTINGS["dual"])


def dense(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN["inputs"][name], dtype=torch.float64)


MASK = dense("mask").bool()
ROWS, LONGEST = MASK.shape
SEQUENCE = torch.arange(ROWS).repeat_interleave(LONGEST)


def tokens(logp: torch.Tensor, weights: torch.Tensor) -> Tokens:
    advantage = torch.tensor(GOLDEN["loss_advantage"], dtype=torch.float64)[SEQUENCE]
    return Tokens(SEQUENCE, MASK.flatten(), ROWS, logp, dense("old").flatten(), advantage, weights)


@pytest.mark.parametrize("grouping", ["groups", "single"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_match_verl(name, grouping):
    ours = advantages(name, GOLDEN["rewards"], GOLDEN[grouping])
    np.testing.assert_allclose(ours, GOLDEN["advantages"][name][grouping], atol=1e-12)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16), st.sampled_from(sorted(ESTIMATORS)))
def test_advantages_of_a_group_sum_to_zero(rewards, name):
    assert abs(advantages(name, rewards, [3] * len(rewards)).sum()) < 1e-6


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_match_verl(name):
    log_ratio = (dense("old") - dense("rollout")).flatten()
    weights, kept = CORRECTIONS[name](
        Mismatch(SEQUENCE, MASK.flatten(), ROWS, log_ratio), SETTINGS["low"], SETTINGS["high"]
    )
    golden = GOLDEN["corrections"][name]
    assert kept.tolist() == torch.tensor(golden["mask"]).bool().flatten().tolist()
    expected = torch.tensor(golden["weights"], dtype=torch.float64).flatten()
    torch.testing.assert_close(weights[kept], expected[kept], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("weighted", ["losses", "losses_tis"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_match_verl(name, weighted):
    loss, golden = LOSSES[name], GOLDEN[weighted][name]
    logp = dense("logp").flatten().requires_grad_()
    weights = torch.ones_like(logp)
    if weighted == "losses_tis":
        weights = torch.tensor(GOLDEN["corrections"]["tis"]["weights"], dtype=torch.float64).flatten()
    batch = tokens(logp, weights)
    terms, clipped = loss.token_loss(batch, CLIP)
    scale = loss.aggregation(batch.lengths(torch.float64), LONGEST)
    value = summed(terms * batch.weight_T, batch, scale.per_sequence_S) / scale.total
    value.backward()
    assert value.item() == pytest.approx(golden["loss"], abs=1e-8)  # verl adds 1e-8 to the length of a sequence
    torch.testing.assert_close(
        logp.grad, torch.tensor(golden["gradient"], dtype=torch.float64).flatten(), atol=1e-8, rtol=1e-8
    )
    assert clipped[MASK.flatten()].double().mean().item() == pytest.approx(golden["clipped"], abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@given(cut=st.integers(1, ROWS - 1))
def test_losses_do_not_depend_on_micro_batches(name, cut):
    loss, whole = LOSSES[name], tokens(dense("logp").flatten(), torch.ones(ROWS * LONGEST, dtype=torch.float64))
    scale = loss.aggregation(whole.lengths(torch.float64), LONGEST)
    parts = 0.0
    for first, last in ((0, cut), (cut, ROWS)):
        here = slice(first * LONGEST, last * LONGEST)
        part = Tokens(
            SEQUENCE[here] - first,
            whole.kept_T[here],
            last - first,
            whole.logp_T[here],
            whole.logp_old_T[here],
            whole.advantage_T[here],
            whole.weight_T[here],
        )
        parts += summed(loss.token_loss(part, CLIP)[0], part, scale.per_sequence_S[first:last]).item() / scale.total
    together = summed(loss.token_loss(whole, CLIP)[0], whole, scale.per_sequence_S).item() / scale.total
    assert parts == pytest.approx(together, abs=1e-12)


def test_kl_penalty_matches_verl():
    torch.testing.assert_close(
        k3(dense("logp"), dense("reference")), torch.tensor(GOLDEN["k3_penalty"], dtype=torch.float64)
    )


def test_mismatch_figures_match_verl():
    log_ratio = (dense("old") - dense("rollout"))[MASK].numpy()
    figures = mismatch(log_ratio, high=SETTINGS["high"], dropped=np.zeros(len(log_ratio), bool), num_nonfinite=3)
    for name, value in GOLDEN["mismatch"].items():
        assert figures[name] == pytest.approx(value, rel=1e-6), name  # verl adds 1e-8 to the mean weight
    rho = np.exp(log_ratio)
    assert figures["share_clipped"] == pytest.approx((rho > SETTINGS["high"]).mean())
    assert figures["mean_abs"] == pytest.approx(np.abs(log_ratio).mean())
    assert figures["prob_error"] == pytest.approx(np.maximum(rho, 1 / rho).mean())
    assert figures["nonfinite"] == 3


def test_mismatch_of_equal_policies_is_nothing():
    figures = mismatch(np.zeros(5), high=2.0, dropped=np.array([0, 0, 0, 0, 1], bool), num_nonfinite=0)
    assert figures["ess"] == figures["max_ratio"] == figures["prob_error"] == 1
    assert figures["k1"] == figures["k3"] == figures["chi2"] == figures["share_clipped"] == 0
    assert figures["share_dropped"] == pytest.approx(0.2)
    assert mismatch(np.zeros(0), high=2.0, dropped=np.zeros(0, bool), num_nonfinite=9)["ess"] == 1


@pytest.mark.parametrize(
    ("dtypes", "warns"),
    [
        (("float32", "float32"), {"k3", "mean_abs"}),
        (("bfloat16", "float32"), set()),
        (("float32", "bfloat16"), set()),
        (("float16", "float32"), {"k3", "mean_abs"}),
    ],
)
def test_what_is_usual_in_bfloat16_warns_in_finer_types(dtypes, warns):
    figures = {"k3": 2.6e-3, "mean_abs": 0.048, "max_ratio": 3.0, "ess": 0.995}  # of a healthy step on an H200
    past = Watch(MismatchBounds().warns(*dtypes)).past(figures)
    assert {line.split()[0] for line in past} == warns
    assert all("is above rl.mismatch.warn_" in line for line in past)


def test_a_usual_bound_lies_within_what_stops_and_a_set_one_counts():
    assert MismatchBounds(stop_k3=2e-3).warns("bfloat16")["k3"] == 2e-3
    assert MismatchBounds(warn_k3=1e-6, warn_mean_abs=None, warn_ess=None).warns("bfloat16") == {"k3": 1e-6}


def test_a_warning_is_said_again_when_it_gets_worse_and_once_when_it_is_over():
    watch = Watch(MismatchBounds(warn_k3=1e-3, warn_ess=0.9, warn_mean_abs=None).warns())
    heard = [
        [words.split(" is ")[1] for words in watch.news({"k3": k3, "ess": ess})]
        for k3, ess in [
            (9e-4, 0.99),
            (2e-3, 0.99),
            (2.5e-3, 0.99),  # the noise of a step
            (9e-4, 0.99),  # near the bound is not over yet
            (4e-3, 0.8),
            (4e-3, 0.75),
            (5e-4, 0.6),
            (5e-4, 0.95),
            (2e-3, 0.99),
        ]
    ]
    above, below = "above rl.mismatch.warn_k3=0.001", "below rl.mismatch.warn_ess=0.9"
    within = "within rl.mismatch.warn_k3=0.001 again", "within rl.mismatch.warn_ess=0.9 again"
    assert heard == [[], [above], [], [], [above, below], [], [within[0], below], [within[1]], [above]]


def test_sums_leave_out_dropped_tokens_even_when_they_are_not_finite():
    flat = Flat(torch.tensor([0, 0, 1]), torch.tensor([True, False, True]), 3)
    values = torch.tensor([1.0, float("nan"), 2.0], requires_grad=True)
    flat.sum(values).sum().backward()
    assert flat.sum(values).tolist() == [1.0, 2.0, 0.0]
    assert values.grad.tolist() == [1.0, 0.0, 1.0]
    assert flat.lengths(torch.float64).tolist() == [1.0, 1.0, 0.0]
