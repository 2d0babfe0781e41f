"""How what was measured of a candidate stands to what was measured of the champion when that was released."""

import math
import re
from collections.abc import Iterator

import pandas as pd

from infra.lineage.versions import Version
from tasks.evaluate.evidence import row

RATE = re.compile(r"acceptance_rate_position_(\d+)")
LATENCIES = ("ttft_p99", "itl_p99")
Figures = dict[tuple[str, str, int], dict]  # rows by figure, domain and concurrency


def drafter_rows(new: pd.DataFrame, old: pd.DataFrame, *, subject: str, champion: str) -> list[dict]:
    """Rows about the drafter `subject`, from its evidence `new` and from `old`, that of the champion's drafter.

    acceptance_length_difference by domain, acceptance_rate_difference by domain and position (`chat, position 2`): new
    minus old, n = drafts of the smaller sample, the interval from both (independent samples). ttft_p99_ratio and
    itl_p99_ratio by domain: new over old. Only what both tables hold at the same concurrency is compared.
    """
    ours, theirs = _latest(new, subject), _latest(old, champion)
    return [
        made for key in sorted(ours.keys() & theirs.keys()) for made in _compare(key, ours[key], theirs[key], subject)
    ]


def pair_rows(table: pd.DataFrame, *, drafter: Version, quant: Version) -> list[dict]:
    """What is known of `drafter` on `quant`.

    quant_drafter_tried: 1 where it is the drafter that the quant was last measured with, else 0.
    quant_acceptance_length_difference by domain: its acceptance length on the quant minus that on the target, n =
    drafts of the smaller sample; none where another one was measured.
    """
    on_target, on_quant = _latest(table, drafter.subject), _latest(table, quant.subject)
    known = on_quant.get(("quant_drafter_version", "", 0))
    tried = known is not None and known["value"] == drafter.version
    told = row("quant_drafter_tried", float(tried), n=1, unit="1 or 0", subject=quant.subject)
    return [told, *(_kept_on_quant(on_target, on_quant, quant.subject) if tried else [])]


def _kept_on_quant(on_target: Figures, on_quant: Figures, quant: str) -> list[dict]:
    pairs = [
        (domain, concurrency, measured, on_target["acceptance_length", domain, concurrency])
        for (figure, domain, concurrency), measured in on_quant.items()
        if figure == "quant_acceptance_length" and ("acceptance_length", domain, concurrency) in on_target
    ]
    return [
        _difference(
            "quant_acceptance_length_difference",
            new,
            old,
            unit="tokens/pass",
            domain=domain,
            n=min(new["n"], old["n"]),
            subject=quant,
            concurrency=concurrency,
        )
        for domain, concurrency, new, old in pairs
    ]


def _compare(key: tuple[str, str, int], new: dict, old: dict, subject: str) -> Iterator[dict]:
    figure, domain, concurrency = key
    labels = dict(n=min(new["n"], old["n"]), subject=subject, concurrency=concurrency)
    if figure == "acceptance_length":
        yield _difference("acceptance_length_difference", new, old, unit="tokens/pass", domain=domain, **labels)
    elif position := RATE.fullmatch(figure):
        where = f"{domain}, position {position[1]}" if domain else f"position {position[1]}"
        yield _difference("acceptance_rate_difference", new, old, unit="share of drafts", domain=where, **labels)
    elif figure in LATENCIES and old["value"] > 0:
        yield row(f"{figure}_ratio", new["value"] / old["value"], unit="ratio", domain=domain, **labels)


def _difference(figure: str, new: dict, old: dict, **labels) -> dict:
    value = new["value"] - old["value"]
    half = math.hypot((new["high"] - new["low"]) / 2, (old["high"] - old["low"]) / 2)
    return row(figure, value, low=value - half, high=value + half, **labels)


def _latest(table: pd.DataFrame, subject: str) -> Figures:
    """The last row of each figure, domain and concurrency."""
    rows = table[table["subject"] == subject].to_dict("records")
    return {(r["figure"], r["domain"], r["concurrency"]): r for r in rows}
