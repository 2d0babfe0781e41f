"""One drafter across the quants of a target, kept and retrained, from the evidence that `lockstep quantize` left."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config.base import Section
from infra.config.flows import FlowConfig
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.store.open import open_store
from tasks.evaluate import evidence
from tasks.evaluate.measurement import Measured, MeasureError

if TYPE_CHECKING:
    import pandas as pd

TABLE = "evidence.parquet"
# Column, its figure about the target's drafter, about a quant.
COLUMNS = {
    "acceptance kept": ("acceptance_length", "quant_acceptance_length"),
    "acceptance retrained": (None, "quant_acceptance_length_retrained"),
    "speedup kept": ("speculation_speedup", "quant_speculation_speedup"),
    "speedup retrained": (None, "quant_speculation_speedup_retrained"),
    "KL, nats/token": (None, "quant_kl"),
    "size": (None, "quant_size_ratio"),
}
POSITION = ("acceptance_rate_position_{}", "quant_acceptance_rate_position_{}")


class QuantsOptions(Section):
    version: str = "latest"
    """Version of the target: a number, `latest`, or an alias."""


class QuantsMeasurement:
    """A table of what is known already; nothing is started."""

    help = "One drafter across a target's quants, kept and retrained, by domain, from the evidence of `quantize`."
    config = FlowConfig
    options = QuantsOptions

    def measure(self, config: FlowConfig, options: QuantsOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError when the target, or a quant of it, does not exist."""
        lineage, name = Lineage(), config.target.name
        target = lineage.resolve(name, options.version)
        if target is None:
            raise MeasureError(f"{name} has no version {options.version}: `lockstep lineage` lists what there is")
        quants = {
            f"{q.tags['lockstep.scheme']} {q.tags.get('lockstep.recipe', '')}".strip(): q
            for q in reversed(lineage.quants(target))
        }
        if not quants:
            raise MeasureError(
                f"{target.label} has no quant: `lockstep quantize --set quantize.retrain_drafter=true` makes one, "
                f"once for each quantize.scheme"
            )
        drafter = next(iter(lineage.drafters(target)), None)
        found = {}
        for scheme, version in ([("none", drafter)] if drafter else []) + [*quants.items()]:
            say(f"{scheme}: {version.label}")
            found[scheme] = _evidence(version)
        table = lines(found)
        return Measured([], table, findings(table))  # what it shows is evidence already, with where it was measured


def lines(found: "Mapping[str, pd.DataFrame]") -> list[dict]:
    """A line for each scheme and domain whose acceptance is known. found: evidence by scheme; `none` is the target's
    own. What has no domain stands in each line. A rate is of the kept drafter, at one position."""
    figures = {scheme: {(r.figure, r.domain): r for r in known.itertuples()} for scheme, known in found.items()}
    columns = dict(COLUMNS)
    position = 1
    while any(
        POSITION[scheme != "none"].format(position) in {f for f, _ in known} for scheme, known in figures.items()
    ):
        columns[f"rate at {position}"] = tuple(figure.format(position) for figure in POSITION)
        position += 1
    table = []
    for scheme, known in figures.items():
        wanted = {column: names[scheme != "none"] for column, names in columns.items()}
        for domain in [d for figure, d in known if figure == wanted["acceptance kept"]]:
            measured = {c: known.get((f, domain)) or known.get((f, "")) for c, f in wanted.items()}
            values = {column: row.value if row else None for column, row in measured.items()}
            table.append({"scheme": scheme, "domain": domain, "drafts": measured["acceptance kept"].n, **values})
    return table


def findings(table: list[dict]) -> list[str]:
    """What retraining on the quant's own states gains, over all domains."""
    found = []
    for line in table:
        kept, retrained = line["acceptance kept"], line["acceptance retrained"]
        if line["domain"] == "all" and retrained is not None:
            gained = (
                f"{line['scheme']}: retrained on the quant's own states the drafter accepts {retrained:.2f} tokens a "
            )
            found.append(gained + f"pass, kept as it is {kept:.2f}: {retrained - kept:+.2f}")
    return found


def _evidence(version: Version) -> "pd.DataFrame":
    store = open_store()
    tables = [evidence.read(store.open(ref) / TABLE) for ref in version.evidence if _has_table(store.open(ref))]
    if not tables:
        raise MeasureError(f"{version.label} has no evidence: it was not measured to the end")
    table = evidence.concat(tables)
    table = table[table["subject"] == version.subject]
    return table.drop_duplicates(["figure", "domain", "concurrency"], keep="last")


def _has_table(folder: Path) -> bool:
    return (folder / TABLE).is_file()


MEASUREMENT = QuantsMeasurement()
