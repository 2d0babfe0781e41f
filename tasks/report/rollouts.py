"""Rollouts as the page's browser shows them: grouped by step and prompt."""

from collections.abc import Sequence
from typing import Any

SHOWN = 400


def groups(rollouts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most SHOWN rollouts, taken evenly over the groups, in groups of one prompt of one step.

    rollouts: `step`, `environment`, `prompt`, `answer`, `reward`, `advantage`, `num_tokens`, `weight_version`
    (a label, or spans of (label, first token, end token)) and, where there is one, `expected`, `turns`, `finish_reason`
    and `error`. A reward is None where the scorer failed, an advantage where the rollout was not trained on.
    """
    by_prompt: dict[tuple, list[dict[str, Any]]] = {}
    for r in rollouts:
        by_prompt.setdefault((int(r["step"]), r["environment"], r["prompt"]), []).append(r)
    found = [_group(key, rows) for key, rows in by_prompt.items()]
    size = max((len(g["rows"]) for g in found), default=1)
    stride = max(1, -(-len(found) * size // SHOWN))
    return found[::stride]


def _group(key: tuple, rows: list[dict[str, Any]]) -> dict[str, Any]:
    step, environment, prompt = key
    rewards = [float(r["reward"]) for r in rows if r["reward"] is not None]
    return {
        "step": step,
        "environment": environment,
        "prompt": prompt,
        "expected": next((r["expected"] for r in rows if r.get("expected") is not None), None),
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "mixed": len(set(rewards)) > 1,
        "rows": [r | {"weights": weights(r.get("weight_version", ""))} for r in rows],
    }


def weights(version: str | int | Sequence) -> str:
    """A label as it is; spans as `v2 0-10, v3 10-16` (token ranges), or the label alone where one covers all."""
    if isinstance(version, (str, int)):
        return str(version)
    spans = [tuple(span) for span in version]
    if len(spans) == 1:
        return str(spans[0][0])
    return ", ".join(f"{label} {start}-{end}" for label, start, end in spans)
