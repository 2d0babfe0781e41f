"""What an RL run measured, as rows of the evidence table."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from tasks.evaluate.evidence import row
from tasks.evaluate.paired import paired_rows
from tasks.evaluate.questions import Answer, accuracy_comparison
from tasks.rl.result import HeldOut


def rows(
    held_out: Sequence[HeldOut],
    before: Sequence[Answer],
    after: Sequence[Answer],
    steps: pd.DataFrame,
    *,
    subject: str,
    seed: int,
    questions_digest: str,
) -> list[dict]:
    """Evidence rows of one run.

    Held-out reward before, after and their paired difference by environment; general questions likewise by task; the
    worst mismatch k3 of a step, nats per token, and tokens that were dropped because a log-prob was not finite.
    held_out: rewards on the same problems. before, after: answers to the same general questions. steps: the step table.
    """
    found = []
    for scores in held_out:
        found += paired_rows(
            ("reward_before", "reward_after", "reward_difference"),
            scores.before,
            scores.after,
            unit="reward",
            subject=subject,
            domain=scores.environment,
            seed=seed,
            dataset_digest=scores.dataset_digest,
        )
    if before:
        found += accuracy_comparison(before, after, subject=subject, seed=seed, dataset_digest=questions_digest)
    if len(steps):
        worst, dropped = float(steps["k3"].max()), float(steps["nonfinite"].sum())
        found.append(row("mismatch_k3_max", worst, n=len(steps), unit="nats per token", subject=subject))
        found.append(row("nonfinite_logprobs", dropped, n=int(steps["tokens"].sum()), unit="tokens", subject=subject))
    return found


def read_steps(path: Path) -> pd.DataFrame:
    """The step table that a run wrote, one row a step."""
    return pd.read_parquet(path)
