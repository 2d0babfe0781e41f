"""A drafter beside the champion's, and one on the quant beside itself on the target."""

import pandas as pd
import pytest
from release_parts import row, table, version

from infra.config.gates import DEFAULT_GATES
from tasks.release.against import drafter_rows, pair_rows
from tasks.release.gates import judge


def test_a_drafter_beside_the_champions_by_domain_and_position():
    """sqrt(0.03^2 + 0.04^2) = 0.05."""

    def side(subject: str, length: float, half: float, n: int, latency: float) -> pd.DataFrame:
        labels = dict(subject=subject, domain="chat", concurrency=8)
        return table(
            row("acceptance_length", 9.0, n=n, low=9.0, high=9.0, **labels),  # an earlier measurement
            row("acceptance_length", length, n=n, low=length - half, high=length + half, **labels),
            row("acceptance_rate_position_2", length / 4, n=n, low=length / 4, high=length / 4, **labels),
            row("itl_p99", latency, n=n, **labels),
        )

    found = drafter_rows(side("drafter:smol/2", 2.0, 0.03, 300, 8.0), side("drafter:smol/1", 2.4, 0.04, 200, 4.0),
                         subject="drafter:smol/2", champion="drafter:smol/1")  # fmt: skip
    by_figure = {(r["figure"], r["domain"]): r for r in found}
    assert set(by_figure) == {
        ("acceptance_length_difference", "chat"),
        ("acceptance_rate_difference", "chat, position 2"),
        ("itl_p99_ratio", "chat"),
    }
    length = by_figure["acceptance_length_difference", "chat"]
    assert (length["value"], length["low"], length["high"]) == pytest.approx((-0.4, -0.45, -0.35))
    assert (length["n"], length["subject"], length["concurrency"]) == (200, "drafter:smol/2", 8)
    assert by_figure["acceptance_rate_difference", "chat, position 2"]["value"] == pytest.approx(-0.1)
    assert by_figure["itl_p99_ratio", "chat"]["value"] == 2.0
    worse = [g for g in DEFAULT_GATES if g.figure == "acceptance_length_difference"]
    (verdict,) = judge(table(*found), worse, {"drafter": "drafter:smol/2"})
    assert (verdict.verdict, verdict.counts) == ("fail", True)


def test_a_drafter_on_the_quant_beside_itself_on_the_target():
    drafter, quant = version("drafter", 1), version("quant", 1)
    both = table(
        row("quant_drafter_version", 1, n=1, subject="quant:smol/1"),
        row("acceptance_length", 2.0, low=1.9, high=2.1, subject="drafter:smol/1", domain="all"),
        row("quant_acceptance_length", 1.5, n=50, low=1.4, high=1.6, subject="quant:smol/1", domain="all"),
        row("quant_acceptance_length", 1.5, low=1.4, high=1.6, subject="quant:smol/1", domain="unmatched"),
    )
    tried, found = pair_rows(both, drafter=drafter, quant=quant)
    assert (tried["figure"], tried["value"], tried["subject"]) == ("quant_drafter_tried", 1.0, "quant:smol/1")
    assert (found["figure"], found["value"], found["n"]) == ("quant_acceptance_length_difference", -0.5, 50)
    assert found["subject"] == "quant:smol/1" and found["low"] < -0.6
    (other,) = pair_rows(both, drafter=version("drafter", 2), quant=quant)  # which was never served with that quant
    (verdict,) = judge(
        table(other), [g for g in DEFAULT_GATES if g.figure == "quant_drafter_tried"], {"pair": "quant:smol/1"}
    )
    assert verdict.counts and "`lockstep quantize --set quantize.adopted=smol-quant/1`" in verdict.reason
