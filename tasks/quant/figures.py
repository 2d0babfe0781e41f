"""The evidence about a quant."""

import hashlib
import json
from collections.abc import Iterator, Sequence

from infra.config.quant import QuantizeConfig
from tasks.evaluate import fidelity, questions
from tasks.evaluate.acceptance import Measurement, speedup_row
from tasks.evaluate.evidence import LOAD, row
from tasks.evaluate.identity import identity_rows
from tasks.evaluate.questions import Answer
from tasks.quant.view import View

REWARD_FIGURES = ("quant_reward_base", "quant_reward", "quant_reward_difference")
TASK_FIGURES = ("quant_task_accuracy_base", "quant_task_accuracy", "quant_task_difference")


def rows(
    base: View,
    quant: View,
    drafted: Sequence[Measurement],
    *,
    load: Sequence[Measurement],
    rewarded: tuple[Sequence[Answer], Sequence[Answer]],
    drafter: int | None,
    config: QuantizeConfig,
    sizes: tuple[int, int],
    prompts: dict,
    subject: str,
    concurrency: int,
) -> list[dict]:
    """Evidence rows of a quant against its base.

    drafted: the quant with its target's drafter, and with the retrained one, as far as there are. load, drafter: the
    former at each of `drafter.load_concurrency`, and its version. rewarded: answers of base and quant to the held-out
    problems. sizes: of the weights of base and quant in an engine, bytes. prompts: what was answered. concurrency:
    requests in flight meanwhile.
    """
    listed = json.dumps(prompts, sort_keys=True).encode()
    labels = dict(subject=subject, dataset_digest="sha256:" + hashlib.sha256(listed).hexdigest())
    asked = questions.load(config.tasks, config.task_questions, config.seed)
    original, copy = sizes
    compared = questions.accuracy_comparison(
        base.answers,
        quant.answers,
        figures=TASK_FIGURES,
        subject=subject,
        seed=config.seed,
        dataset_digest=questions.digest(asked),
    )
    found = [
        *fidelity.rows(base.scored, quant.scored, seed=config.seed, **labels),
        *compared,
        *_recovery(compared),
        *_rewards(rewarded, subject, config.seed),
        row("quant_bytes", copy, n=1, unit="bytes", subject=subject),
        row("quant_size_ratio", copy / original, n=1, unit="ratio", subject=subject),
        *_labelled(quant.speed, labels),
        speedup_row(quant.speed, base.speed, figure="quant_speedup", concurrency=concurrency, **labels),
    ]
    if drafter is not None:
        found.append(row("quant_drafter_version", drafter, n=1, unit="version", subject=subject))
    for speculating, suffix in zip(drafted, ("", "_retrained"), strict=False):
        figure = f"quant_speculation_speedup{suffix}"
        found += [
            *(_as_quant(measured) | labels for measured in speculating.rows),
            speedup_row(speculating, quant.speed, figure=figure, concurrency=concurrency, **labels),
        ]
        if not suffix:
            outputs = (quant.speed.outputs, speculating.outputs)
            found += identity_rows(*outputs, again=quant.again, prefix="quant_", **labels)
    for speculating, plain in zip(load, quant.load, strict=False):  # none of the former without a drafter
        at = labels | {"domain": "all", "concurrency": plain.rows[0]["concurrency"]}
        found += [*_labelled(plain, labels), *_labelled(speculating, labels)]
        found.append(speedup_row(speculating, plain, figure=f"{LOAD}quant_speculation_speedup", **at))
    return found


def of_base(rows: Sequence[dict], subject: str) -> list[dict]:
    """The accuracy of the base among the `rows` about its quant, as rows about the base: task_accuracy by domain."""
    asked = [r for r in rows if r["figure"] == TASK_FIGURES[0]]
    return [r | {"figure": "task_accuracy", "subject": subject} for r in asked]


def _rewards(rewarded: tuple[Sequence[Answer], Sequence[Answer]], subject: str, seed: int) -> list[dict]:
    base, quant = rewarded
    if not base:
        return []
    asked = "sha256:" + hashlib.sha256(json.dumps([answer.asked for answer in base]).encode()).hexdigest()
    labels = dict(figures=REWARD_FIGURES, unit="reward", subject=subject, seed=seed, dataset_digest=asked)
    return questions.accuracy_comparison(base, quant, **labels)


def _recovery(compared: list[dict]) -> Iterator[dict]:
    """quant_recovery by domain: accuracy of the quant over that of the base, from the rows of their paired difference;
    its interval is the difference's, the base's accuracy taken as it is. None where the base answers nothing right."""
    base, _, difference = ({r["domain"]: r for r in compared if r["figure"] == f} for f in TASK_FIGURES)
    for domain, change in difference.items():
        if (right := base[domain]["value"]) > 0:
            ends = {end: 1 + change[end] / right for end in ("value", "low", "high")}
            yield change | ends | {"figure": "quant_recovery", "unit": "ratio"}


def _labelled(measurement: Measurement, labels: dict) -> list[dict]:
    return [measured | labels for measured in measurement.rows]


def _as_quant(measured: dict) -> dict:
    """A row whose figure says that it is of a quant."""
    figure = measured["figure"]
    return measured | {"figure": figure if figure.startswith("quant_") else f"quant_{figure}"}
