"""Pictures of the quantized copy's fidelity."""

from tasks.report.plots.compare import changes, values
from tasks.report.plots.figure import Figure, interval
from tasks.report.plots.svg import number, sign
from tasks.report.summary import GateVerdict, QuantFidelity


def fidelity(quant: QuantFidelity, gates: list[GateVerdict]) -> list[Figure]:
    """KL, flips and perplexity by domain, and task accuracy against the base."""
    bounds = {g.figure: (g.bound, f"gate {sign(g.comparison)} {number(g.bound)}") for g in gates}
    figures = []
    if quant.kl:
        figures.append(
            values(
                "quant-kl",
                "Divergence from the base by domain",
                list(quant.kl.items()),
                unit="KL(base || quant), nats per token",
                log=True,
                bound=bounds.get("quant_kl"),
            )
        )
    if quant.flips:
        figures.append(
            values(
                "quant-flips",
                "Flips by domain",
                list(quant.flips.items()),
                unit="share of positions whose top token changed",
                origin=0.0,
                bound=bounds.get("quant_flips"),
            )
        )
    if quant.perplexity_ratio:
        figures.append(
            values(
                "quant-perplexity",
                "Perplexity by domain",
                list(quant.perplexity_ratio.items()),
                unit="perplexity of the quant / of the base",
                digits=5,
                origin=1.0,
                bound=bounds.get("quant_perplexity_ratio"),
            )
        )
    for name, title, compared, unit in (
        ("tasks", "Task accuracy, base and quant", quant.tasks, "share of the questions answered right"),
        ("rewards", "Held-out reward, base and quant", quant.rewards, "reward"),
    ):
        if not compared:
            continue
        differences = [f"{t or 'all'} {interval(c.difference)}" for t, c in compared.items() if c.difference]
        figures.append(
            changes(
                f"quant-{name}",
                title,
                [(t or "all", c.before, c.after) for t, c in compared.items()],
                unit=unit,
                names=("base", "quant"),
                origin=0.0,
                caption=f"Difference, paired, 95% interval: {'; '.join(differences)}." if differences else "",
            )
        )
    return figures
