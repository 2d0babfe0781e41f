"""From the evidence table and the RL step table to the loop's summary."""

from collections.abc import Sequence

import pandas as pd

from tasks.report.measured import Measured
from tasks.report.summary import (
    Acceptance,
    AcceptanceChange,
    Answer,
    Comparison,
    Estimate,
    GateVerdict,
    LoopSummary,
    Mismatch,
    MismatchStep,
    Phase,
    QuantFidelity,
    Released,
    Versions,
)

SPECULATION = {
    "speedup": "speculation_speedup",
    "tokens_per_second": "tokens_per_second",
    "tokens_per_second_plain": "tokens_per_second_plain",
    "output_identity": "output_identity",
}
Bounds = tuple[dict[str, float], dict[str, float]]
MISMATCH_COLUMNS = ("k1", "k3", "chi2", "mean_abs", "max_ratio", "ess", "share_clipped", "share_dropped")


def summarise(
    *,
    run: str,
    flow: str,
    verdict: str,
    started: str,
    wall_s: float,
    phases: dict[str, Phase],
    versions: Versions,
    engine: str,
    hardware: str,
    measured: Measured,
    mismatch_bounds: Bounds = ({"k3": 1e-3}, {"k3": 1e-1}),
    ratio_bound: float | None = None,
    scheme: str = "",
    verdicts: Sequence[GateVerdict] = (),
    released: Released | None = None,
    served: Sequence[Answer] = (),
    addresses: dict[str, str] | None = None,
    error: str = "",
) -> LoopSummary:
    """The summary of one loop.

    measured: tables of all phases that ran; the steps have column `step` and those of MISMATCH_COLUMNS.
    mismatch_bounds: by figure, the bound that marks a step and the one that stops the run.
    ratio_bound: probability ratio above which the correction truncates or masks a token.
    scheme: quantization scheme; empty where nothing was quantized.
    """
    evidence = measured.evidence
    return LoopSummary(
        run=run,
        flow=flow,
        verdict=verdict,
        error=error,
        started=started,
        wall_s=wall_s,
        phases=phases,
        versions=versions,
        engine=engine,
        hardware=hardware,
        rewards=comparisons(evidence, "reward_before", "reward_after", "reward_difference"),
        tasks=comparisons(evidence, "task_accuracy_before", "task_accuracy_after", "task_difference"),
        mismatch=mismatch(measured.steps, mismatch_bounds, ratio_bound),
        acceptance=AcceptanceChange(
            before=acceptance(evidence, suffix="_before"),
            after=acceptance(evidence),
            on_quant=acceptance(evidence, prefix="quant_"),
        ),
        speculation=speculation(evidence),
        quant=quant_fidelity(evidence, scheme),
        gates=list(verdicts),
        released=released or Released(),
        served=list(served),
        addresses=addresses or {},
    )


def estimates(evidence: pd.DataFrame, figure: str) -> dict[str, Estimate]:
    """A figure by domain; the last measurement of a domain counts."""
    rows = evidence[evidence["figure"] == figure]
    return {r.domain: Estimate(value=r.value, low=r.low, high=r.high, n=r.n) for r in rows.itertuples()}


def comparisons(evidence: pd.DataFrame, before: str, after: str, difference: str) -> dict[str, Comparison]:
    """Scores on the same questions by domain."""
    sides = {"before": before, "after": after, "difference": difference}
    found = {side: estimates(evidence, figure) for side, figure in sides.items()}
    domains = dict.fromkeys(d for by_domain in found.values() for d in by_domain)
    return {d: Comparison(**{side: by_domain.get(d) for side, by_domain in found.items()}) for d in domains}


def acceptance(evidence: pd.DataFrame, *, prefix: str = "", suffix: str = "") -> dict[str, Acceptance]:
    """Acceptance length and the rates of positions 1, 2, ... by domain."""
    lengths = estimates(evidence, f"{prefix}acceptance_length{suffix}")
    rates: list[dict[str, Estimate]] = []
    while found := estimates(evidence, f"{prefix}acceptance_rate_position_{len(rates) + 1}{suffix}"):
        rates.append(found)
    return {
        domain: Acceptance(
            length=length.value,
            low=length.low,
            high=length.high,
            by_position=[r[domain].value for r in rates if domain in r],
            n=length.n,
        )
        for domain, length in lengths.items()
    }


def mismatch(steps: pd.DataFrame, bounds: Bounds, ratio_bound: float | None = None) -> Mismatch | None:
    """Mismatch by step, or None where no step was taken."""
    if steps.empty:
        return None
    known = [c for c in MISMATCH_COLUMNS if c in steps]
    rows = [
        MismatchStep(step=int(record["step"]), **{c: float(record[c]) for c in known})
        for record in steps.to_dict("records")
    ]
    return Mismatch(steps=rows, warn=bounds[0], stop=bounds[1], ratio_bound=ratio_bound)


def speculation(evidence: pd.DataFrame) -> dict[str, dict[str, Estimate]]:
    """What speculation did to serving, by domain."""
    by_domain: dict[str, dict[str, Estimate]] = {}
    for name, figure in SPECULATION.items():
        for domain, estimate in estimates(evidence, figure).items():
            by_domain.setdefault(domain, {})[name] = estimate
    return by_domain


def quant_fidelity(evidence: pd.DataFrame, scheme: str) -> QuantFidelity | None:
    """How faithful the quantized copy is, or None where none was made."""
    if not scheme:
        return None
    return QuantFidelity(
        scheme=scheme,
        kl=estimates(evidence, "quant_kl"),
        flips=estimates(evidence, "quant_flips"),
        perplexity_ratio=estimates(evidence, "quant_perplexity_ratio"),
        tasks=comparisons(evidence, "quant_task_accuracy_base", "quant_task_accuracy", "quant_task_difference"),
        rewards=comparisons(evidence, "quant_reward_base", "quant_reward", "quant_reward_difference"),
    )
