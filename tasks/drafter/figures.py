"""What is known of a drafter, as rows of evidence and as a training curve."""

from pathlib import Path
from typing import TYPE_CHECKING

from infra.engine.pin import engine_pin, hardware
from tasks.drafter.worker import TrainingResult
from tasks.evaluate import evidence
from tasks.evaluate.acceptance import Measurement, keep, speedup_row
from tasks.evaluate.evidence import row
from tasks.evaluate.identity import identity_rows

if TYPE_CHECKING:
    import pandas as pd

TABLE = "evidence.parquet"
CURVE = "curve.parquet"


def rows(
    subject: str,
    result: TrainingResult,
    plain: Measurement,
    before: Measurement,
    after: Measurement,
    *,
    dataset_digest: str,
    captured_tokens: int,
    captured_bytes: int,
) -> list[dict]:
    """Rows about the drafter `subject`.

    plain, before, after: measured on the same prompts without speculation, with what training started from, and with
    the trained head. Beside their own rows: speculation_speedup, output_identity by domain, draft_vocab_coverage (share
    of generated tokens), training_tokens, hidden_states_bytes.
    """
    labels = dict(subject=subject, dataset_digest=dataset_digest)
    return [
        *before.rows,
        *after.rows,
        *({**measured, "subject": subject} for measured in plain.rows),
        speedup_row(after, plain, **labels),
        *identity_rows(plain.outputs, after.outputs, **labels),
        row("draft_vocab_coverage", result.draft_vocab_coverage, n=captured_tokens, unit="share", subject=subject),
        row("training_tokens", result.tokens, n=result.tokens, unit="tokens", subject=subject),
        row("hidden_states_bytes", captured_bytes, n=captured_tokens, unit="bytes", subject=subject),
    ]


def write(folder: Path, measured: list[dict], result: TrainingResult, plain: Measurement, command: str) -> None:
    """The table of `measured` and the training curve; `plain` beside them for who measures the same target again."""
    import pandas as pd

    table = evidence.table(measured, engine=engine_pin(), hardware=hardware(), command=command)
    evidence.write(table, folder / TABLE)
    curve = pd.DataFrame(result.curve).astype("float64").astype({"step": "int64"})
    curve.to_parquet(folder / CURVE, index=False)
    keep(plain, folder)


def read(folder: Path) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """(evidence table, training curve) that `write` wrote."""
    import pandas as pd

    return evidence.read(folder / TABLE), pd.read_parquet(folder / CURVE)
