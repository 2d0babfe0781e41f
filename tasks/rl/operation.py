"""How an RL run used its machine, as rows of the evidence table: what the design review asks of it."""

from collections.abc import Callable

import pandas as pd

from tasks.evaluate.evidence import row


def rows(steps: pd.DataFrame, *, subject: str, transport: str, placement: str) -> list[dict]:
    """Rows of one run; figures whose columns hold no number are left out.

    steps: the step table. transport, placement: domain of what depends on them.
    weight_sync_*: bytes of an update to one engine, bytes/s into the engine's memory (median step), longest pause of an
    engine, and publishing and moving weights / step time. *_idle_share: share of the time of all steps in which engines
    sampled nothing, and in which the trainer waited for rollouts or for a sync. decode_share, kv_cache_peak,
    preemptions, prefix_hit_rate: see `infra/engine/load.py`. mismatch_steps_marked: steps past a bound that warns.
    """
    if not len(steps):
        return []
    time, rollouts = steps["step_s"], int(steps["rollouts"].sum())
    moved, paths = float((steps["publish_s"] + steps["sync_s"]).sum() / time.sum()), dict(domain=transport)
    bandwidth = float((steps["sync_bytes"] / steps["transfer_s"]).median())

    def over(column: str, how: Callable[[pd.Series], float]) -> float:
        return float(how(steps[column]))

    def share(column: str) -> float:
        return float((steps[column] * time).sum() / time.sum())

    found = [
        ("weight_sync_bytes", over("sync_bytes", max), "bytes", paths),
        ("weight_sync_bandwidth", bandwidth, "bytes/s", paths),
        ("weight_sync_pause_max", over("pause_s", max), "s", paths),
        ("weight_sync_share", moved, "share of step time", paths),
        ("engine_idle_share", share("engine_idle_share"), "share of step time", dict(domain=placement)),
        ("trainer_idle_share", share("trainer_idle_share"), "share of step time", dict(domain=placement)),
        ("rollout_tokens_per_second", float(steps["tokens"].sum() / steps["rollout_s"].sum()), "tokens/s", {}),
        ("rollout_length_max", over("length_max", max), "tokens", {}),
        ("decode_share", over("decode_share", pd.Series.mean), "share of request time", {}),
        ("kv_cache_peak", over("kv_cache_peak", pd.Series.max), "share of the cache", {}),
        ("preemptions", over("preemptions", sum), "preemptions", {"n": rollouts}),
        ("prefix_hit_rate", over("prefix_hit_rate", pd.Series.mean), "share of prompt tokens", {}),
        ("mismatch_steps_marked", over("mismatch_warning", lambda marks: (marks > 0).sum()), "steps", {}),
    ]
    return [
        row(figure, value, unit=unit, subject=subject, **{"n": len(steps)} | labels)
        for figure, value, unit, labels in found
        if value == value
    ]
