"""One drafter across the quants of a target, kept and retrained, from the evidence that was left about each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config.base import Section
from infra.config.flows import FlowConfig
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.store.open import open_store
from tasks.evaluate import evidence
from tasks.evaluate.measurement import Line, Measured, MeasureError, Picture

if TYPE_CHECKING:
    import pandas as pd

TABLE = "evidence.parquet"
BASE = "base"  # in place of a scheme: the target itself
TRIED = "quant_drafter_version"
LENGTH, RATE = "acceptance_length", "acceptance_rate_position_{}"
AGAIN = "_retrained"


class QuantsOptions(Section):
    version: str = "latest"
    """Version of the target: a number, `latest`, or an alias."""


class QuantsMeasurement:
    """A table of what is known already; nothing is started."""

    help = "One drafter across a target's quants, kept and retrained, by domain, from the evidence of `quantize`."
    config = FlowConfig
    options = QuantsOptions

    def measure(self, config: FlowConfig, options: QuantsOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError when the target does not exist, or no drafter was tried on a quant of it."""
        lineage, name = Lineage(), config.target.name
        target = lineage.resolve(name, options.version)
        if target is None:
            raise MeasureError(f"{name} has no version {options.version}: `lockstep lineage` lists what there is")
        found: dict[str, pd.DataFrame] = {}
        drafter = None
        for quant in lineage.quants(target):
            scheme = f"{quant.tags['lockstep.scheme']} {quant.tags.get('lockstep.recipe', '')}".strip()
            known = _evidence(quant)
            tried = next((int(v) for v in known[known["figure"] == TRIED]["value"]), None)
            drafter = drafter or (lineage.get(f"{name}-drafter/{tried}") if tried else None)
            if tried is None or tried != drafter.version:
                say(f"{quant.label} is left out: {f'drafter {tried}' if tried else 'no drafter'} was tried on it")
            elif scheme not in found:  # the newest of each
                say(f"{scheme}: {quant.label}")
                found[scheme] = known.assign(figure=known["figure"].str.removeprefix("quant_"))
        if drafter is None:
            raise MeasureError(
                f"no quant of {target.label} was measured with a drafter: `lockstep drafter`, and then `lockstep "
                f"quantize --set quantize.retrain_drafter=true` once for each quantize.scheme"
            )
        known = {BASE: _of_base(lineage, target, drafter, say)} | dict(reversed(found.items()))
        table = lines(known)
        return Measured([], table, findings(known, table), pictures(known))  # evidence as it is, with where it is from


def lines(found: "Mapping[str, pd.DataFrame]") -> list[dict]:
    """A line for each scheme and domain whose acceptance is known. found: evidence by scheme, figures named as the
    drafter's are. `±` is of the gain, 95%, drafts taken as independent; rates by position are shares of drafts."""
    table = []
    for scheme, known in found.items():
        rows = _rows(known)
        for domain in [d for figure, d in rows if figure == LENGTH]:
            kept, again = rows[LENGTH, domain], rows.get((LENGTH + AGAIN, domain))
            kl = rows.get(("kl", domain))
            line = {"scheme": scheme, "domain": domain, "drafts": kept.n, "kept": kept.value}
            line |= {"retrained": None, "gain": None, "±": None}
            if again:
                half = ((kept.high - kept.value) ** 2 + (again.high - again.value) ** 2) ** 0.5
                line |= {"retrained": again.value, "gain": again.value - kept.value, "±": half}
            for which, suffix in (("kept", ""), ("retrained", AGAIN)):
                line[f"{which} by position"] = " ".join(f"{rate:.3f}" for rate in _rates(rows, domain, suffix)) or None
            table.append(line | {"KL, nats": kl.value if kl else None})
    return table


def findings(found: "Mapping[str, pd.DataFrame]", table: list[dict]) -> list[str]:
    """Of each scheme over all domains: what the kept drafter loses, what retraining gains beyond as much training on
    the base, and what the quant itself costs and gains. found: as `lines` takes it."""
    whole = {line["scheme"]: line for line in table if line["domain"] == "all"}
    base, told = whole.get(BASE), []
    for scheme, line in whole.items():
        said = f"{scheme}: kept as it is, the drafter accepts {line['kept']:.3f} tokens a pass"
        if base and scheme != BASE:
            said += f" ({line['kept'] / base['kept'] - 1:+.1%} against the base)"
        if line["retrained"] is not None:
            more = "trained further on the base" if scheme == BASE else "retrained on the quant's own states"
            said += f"; {more} {line['retrained']:.3f} ({line['gain']:+.3f} ± {line['±']:.3f}"
            if base and scheme != BASE and base["retrained"] is not None:
                half = (line["±"] ** 2 + base["±"] ** 2) ** 0.5
                said += f", {line['gain'] - base['gain']:+.3f} ± {half:.3f} beyond what the base gains"
            said += ")"
        told.append(said + _beside(_rows(found[scheme])))
    places = sorted({f"{r.hardware}, {r.engine}" for known in found.values() for r in known.itertuples()})
    return [*told, f"measured on {'; '.join(places)}"]


def pictures(found: "Mapping[str, pd.DataFrame]") -> list[Picture]:
    """Acceptance by position over all domains, kept and retrained. found: as `lines` takes it."""
    curves = []
    for scheme, known in found.items():
        for which, suffix, beside in (("kept", "", ""), ("retrained", AGAIN, f"{scheme}, kept")):
            if rates := _rates(_rows(known), "all", suffix):
                curves.append(Line(f"{scheme}, {which}", list(enumerate(rates, 1)), beside))
    title = "Accepted drafts by position, all domains"
    return [Picture(title, "proposed token", "share of drafts", curves)] if curves else []


def _beside(rows: dict) -> str:
    """What is known of a scheme over all domains beside acceptance, to be said after it."""
    said = ""
    for figure, words in (
        ("speculation_speedup", "; {:.2f} times as fast with it as without"),
        ("speculation_speedup" + AGAIN, ", retrained {:.2f}"),
        ("kl", "; KL to the base {:.2g} nats/token"),
        ("perplexity_ratio", ", perplexity {:.4f} times the base's"),
        ("task_difference", ", {:+.1%} of the questions right"),
        ("size_ratio", ", {:.2f} of the base's size"),
    ):
        if row := rows.get((figure, "all")) or rows.get((figure, "")):
            said += words.format(row.value)
    return said


def _rows(known: "pd.DataFrame") -> dict:
    return {(r.figure, r.domain): r for r in known.itertuples()}


def _rates(rows: dict, domain: str, suffix: str) -> list[float]:
    """Shares of drafts that were accepted at the first position and at those after it."""
    rates = []
    while row := rows.get((RATE.format(len(rates) + 1) + suffix, domain)):
        rates.append(row.value)
    return rates


def _of_base(lineage: Lineage, target: Version, drafter: Version, say: Callable[[str], None]) -> "pd.DataFrame":
    """Evidence of `drafter` on its own target; where another was trained on from it for the same target, what it
    accepted beside that one, and that one as the retrained."""
    known = _evidence(drafter)
    say(f"{BASE}: {drafter.label}")
    for control in lineage.drafters(target):
        further = _evidence(control)
        if control.parent == drafter.label and len(further):
            say(f"{BASE}, trained further: {control.label}")
            before = further["figure"].str.endswith("_before")
            kept = further[before].assign(figure=further["figure"].str.removesuffix("_before"))
            return _last(evidence.concat([known, kept, further[~before].assign(figure=further["figure"] + AGAIN)]))
    return known


def _evidence(version: Version) -> "pd.DataFrame":
    """All that is known of `version`; empty where it was not measured to the end."""
    store = open_store()
    tables = [evidence.read(store.open(ref) / TABLE) for ref in version.evidence if _has_table(store.open(ref))]
    table = evidence.concat(tables)
    return _last(table[table["subject"] == version.subject])


def _last(table: "pd.DataFrame") -> "pd.DataFrame":
    return table.drop_duplicates(["figure", "domain", "concurrency"], keep="last")


def _has_table(folder: Path) -> bool:
    return (folder / TABLE).is_file()


MEASUREMENT = QuantsMeasurement()
