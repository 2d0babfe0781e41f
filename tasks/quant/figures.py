"""The evidence about a quant."""

import hashlib
import json

from infra.config.quant import QuantizeConfig
from infra.store.refs import ArtifactRef
from tasks.evaluate import fidelity, questions
from tasks.evaluate.acceptance import Measurement, speedup_row
from tasks.evaluate.evidence import row
from tasks.evaluate.identity import identity_rows
from tasks.quant.view import View

TASK_FIGURES = ("quant_task_accuracy_base", "quant_task_accuracy", "quant_task_difference")


def rows(
    base: View,
    quant: View,
    speculating: Measurement | None,
    *,
    config: QuantizeConfig,
    artifacts: tuple[ArtifactRef, ArtifactRef],
    prompts: dict,
    subject: str,
    concurrency: int,
) -> list[dict]:
    """Evidence rows of a quant against its base.

    speculating: the quant with its target's drafter, None where there is no drafter.
    artifacts: base and quant. prompts: what was answered. concurrency: requests in flight meanwhile.
    """
    listed = json.dumps(prompts, sort_keys=True).encode()
    labels = dict(subject=subject, dataset_digest="sha256:" + hashlib.sha256(listed).hexdigest())
    asked = questions.load(config.tasks, config.task_questions, config.seed)
    original, copy = artifacts
    found = [
        *fidelity.rows(base.scored, quant.scored, seed=config.seed, **labels),
        *questions.accuracy_comparison(
            base.answers,
            quant.answers,
            figures=TASK_FIGURES,
            subject=subject,
            seed=config.seed,
            dataset_digest=questions.digest(asked),
        ),
        row("quant_bytes", copy.bytes, n=1, unit="bytes", subject=subject),
        row("quant_size_ratio", copy.bytes / original.bytes, n=1, unit="ratio", subject=subject),
        *_labelled(quant.speed, labels),
        speedup_row(quant.speed, base.speed, figure="quant_speedup", concurrency=concurrency, **labels),
    ]
    if speculating:
        found += [
            *_labelled(speculating, labels),
            speedup_row(
                speculating, quant.speed, figure="quant_speculation_speedup", concurrency=concurrency, **labels
            ),
            *identity_rows(quant.speed.outputs, speculating.outputs, prefix="quant_", **labels),
        ]
    return found


def _labelled(measurement: Measurement, labels: dict) -> list[dict]:
    return [measured | labels for measured in measurement.rows]
