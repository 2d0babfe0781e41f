"""What is known of a drafter, as rows of evidence and as a training curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra.engine.pin import engine_pin, hardware
from tasks.drafter.worker import TrainingResult
from tasks.evaluate import evidence
from tasks.evaluate.acceptance import Measurement, keep, speedup_row
from tasks.evaluate.best_k import best_rows
from tasks.evaluate.evidence import row
from tasks.evaluate.identity import Outputs, identity_rows

if TYPE_CHECKING:
    import pandas as pd

TABLE = "evidence.parquet"
CURVE = "curve.parquet"
CURVES = ("step", "loss", "lr", "grad_norm", "held_out_acceptance")


def rows(
    subject: str,
    result: TrainingResult | None,
    plain: Sequence[Measurement],
    before: Sequence[Measurement],
    after: Sequence[Measurement],
    *,
    again: Outputs | None,
    dataset_digest: str,
    captured_tokens: int,
    captured_bytes: int,
) -> list[dict]:
    """Rows about the drafter `subject`; result: of its training, where there was one.

    plain, before, after: measured on the same prompts without speculation, with the drafter it was warmed from, if any,
    and with the drafter; the first of each at temperature 0. again: a second run without the drafter, whose noise the
    output's identity is compared with. Beside their own rows: for each of `after` speculation_speedup,
    best_num_speculative_tokens and speedup_at_best; output_identity by domain, draft_vocab_coverage (share of generated
    tokens), training_tokens, hidden_states_bytes.
    """
    labels = dict(subject=subject, dataset_digest=dataset_digest)
    return [
        *(measured for one in (*before, *after) for measured in one.rows),
        *({**measured, "subject": subject} for one in plain for measured in one.rows),
        *(found for one, without in zip(after, plain, strict=True) for found in compared(one, without, **labels)),
        *identity_rows(plain[0].outputs, after[0].outputs, again=again, **labels),
        *(_training_rows(subject, result, captured_tokens, captured_bytes) if result else []),
    ]


def _training_rows(subject: str, result: TrainingResult, captured_tokens: int, captured_bytes: int) -> list[dict]:
    n = captured_tokens or result.tokens
    rows = [
        row("draft_vocab_coverage", result.draft_vocab_coverage, n=n, unit="share", subject=subject),
        row("training_tokens", result.tokens, n=result.tokens, unit="tokens", subject=subject),
    ]
    if captured_bytes:
        rows.append(row("hidden_states_bytes", captured_bytes, n=captured_tokens, unit="bytes", subject=subject))
    return rows


def compared(with_drafter: Measurement, without: Measurement, **labels: str) -> list[dict]:
    """speculation_speedup, best_num_speculative_tokens and speedup_at_best of one measurement, named as its own rows
    are: `load_` before figures under load, which carry their concurrency, `_sampled` behind those at temperature."""
    example = next(r for r in with_drafter.rows if "tokens_per_second" in r["figure"])
    prefix, suffix = example["figure"].split("tokens_per_second")
    at = {"domain": "all", "concurrency": example["concurrency"]} if prefix else {"concurrency": example["concurrency"]}
    speedup = speedup_row(with_drafter, without, figure=f"{prefix}speculation_speedup{suffix}", **labels, **at)
    return [speedup, *best_rows(with_drafter.rows, without.rows, labels | at, prefix=prefix, suffix=suffix)]


def write(folder: Path, measured: list[dict], result: TrainingResult | None, plain: Measurement, command: str) -> None:
    """The table of `measured` and the training curve, empty without training; `plain` beside them for who measures the
    same target again."""
    import pandas as pd

    table = evidence.table(measured, engine=engine_pin(), hardware=hardware(), command=command)
    evidence.write(table, folder / TABLE)
    curve = (
        pd.DataFrame(result.curve if result else dict.fromkeys(CURVES, [])).astype("float64").astype({"step": "int64"})
    )
    curve.to_parquet(folder / CURVE, index=False)
    keep(plain, folder)


def read(folder: Path) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """(evidence table, training curve) that `write` wrote."""
    import pandas as pd

    return evidence.read(folder / TABLE), pd.read_parquet(folder / CURVE)
