"""The report's first lines: what happened to which versions, and the key figures."""

from infra.services import durations
from tasks.report.plots.figure import interval
from tasks.report.plots.svg import number
from tasks.report.summary import Comparison, LoopSummary

MARK = {
    "pass": "✓",
    "fail": "✗",
    "undecided": "?",
    "released": "✓",
    "refused": "✗",
    "finished": "✓",
    "failed": "✗",
}


def headline(s: LoopSummary) -> str:
    """One line: the target, and what the run did with it."""
    v = s.versions
    target = f"{v.name} v{v.target}" + (f" ← v{v.parent}" if v.parent else "")
    if s.verdict == "refused":
        return f"{target}: release refused"
    if s.verdict == "failed":
        return f"{target}: the run failed"
    if s.verdict == "finished":
        return f"{target}: {s.flow} finished"
    parts = [f"drafter v{v.drafter}"] if s.released.drafter else []
    parts += [f"quant v{v.quant}"] if s.released.quant else []
    return f"{target} released " + (f"with {' and '.join(parts)}" if parts else "alone")


def tiles(s: LoopSummary) -> list[dict[str, str]]:
    """Key figures as name, value and a line of words; figures that were not measured are left out."""
    found = [_score(f"held-out reward, {name or 'all'}", c) for name, c in s.rewards.items()]
    found += [_score(f"questions, {name or 'all'}", c) for name, c in s.tasks.items()]
    if s.mismatch and s.mismatch.worst["k3"] is not None:
        found.append(_tile("mismatch k3, worst step", number(s.mismatch.worst["k3"]), "nats per token"))
    length = {side: _overall(getattr(s.acceptance, side)) for side in ("before", "after", "on_quant")}
    if length["after"] is not None:
        value = (
            f"{number(length['before'])} → {number(length['after'])}" if length["before"] else number(length["after"])
        )
        on_quant = f", {number(length['on_quant'])} on the quant" if length["on_quant"] else ""
        found.append(_tile("acceptance length", value, f"tokens per target pass{on_quant}"))
    speedups = [f["speedup"] for f in s.speculation.values() if "speedup" in f and f["speedup"].value is not None]
    if speedups:
        name = "speedup by speculation" + ("" if len(speedups) == 1 else ", slowest domain")
        found.append(_tile(name, f"{number(min(e.value for e in speedups))}×", "tokens/s with / without"))
    if s.quant and s.quant.kl:
        domains = {d: kl for d, kl in s.quant.kl.items() if d != "all"} or s.quant.kl
        domain, kl = max(domains.items(), key=lambda item: item[1].value or 0)
        found.append(_tile("quant KL, worst domain", number(kl.value), f"nats per token, {domain or 'all'}"))
    found.append(_tile("wall time", durations.words(s.wall_s), f"{100 * s.overhead['share']:.0f}% overhead"))
    return found


def _tile(name: str, value: str, words: str) -> dict[str, str]:
    return {"name": name, "value": value, "words": words}


def _score(name: str, c: Comparison) -> dict[str, str]:
    before, after = (number(e.value) if e else "–" for e in (c.before, c.after))
    words = f"change {interval(c.difference)}, n={c.difference.n}" if c.difference else ""
    return _tile(name, f"{before} → {after}", words)


def _overall(by_domain: dict) -> float | None:
    """Over all drafts; `all` where it was measured."""
    if "all" in by_domain:
        return by_domain["all"].length
    known = [a for a in by_domain.values() if a.length is not None]
    drafts = sum(a.n for a in known)
    return sum(a.length * a.n for a in known) / drafts if drafts else None
