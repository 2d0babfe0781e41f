"""The seven questions of a design review, answered from evidence."""

from collections.abc import Sequence
from typing import Any

from infra.config.review import ReviewConfig
from infra.config.rl import MismatchBounds
from tasks.report.plots.svg import number
from tasks.report.review.findings import Fact, Finding, Verdict
from tasks.report.review.known import Known
from tasks.report.review.paths import transports

RETRAINS = ("drafter", "quantize")  # flows that a trigger must start
PHASES = ("rl", "drafter", "quantize", "release")
GIB = 2**30


def answer(known: Known, config: ReviewConfig) -> list[Finding]:
    """A finding for each question, in the order of the checklist."""
    return [question(known, config) for question in QUESTIONS]


def weight_sync(known: Known, config: ReviewConfig) -> Finding:
    """Sized: the share of a step that goes into moving weights, at the bandwidth that was measured."""
    share, bandwidth, size = (known.row(f"weight_sync_{f}") for f in ("share", "bandwidth", "bytes"))
    pause = known.row("weight_sync_pause_max")
    bound = config.max_sync_share
    say = _about(
        "weight-sync",
        "Is the weight-sync path sized like a fabric, with its bandwidth measured?",
        "a faster path, or fewer steps for the same time of training; `lockstep measure transport` compares paths, "
        "review.max_sync_share is the bound",
    )
    step_s = None if known.measured.steps.empty else known.step_s
    compared = transports(known.transports, known.transports_from, known.versions["target"].name, step_s)
    if share is None or bandwidth is None or size is None:
        why = "no weight update of this target's training was measured: train it with `lockstep rl`"
        return say("unknown", why, compared)
    rows = [
        ("path", bandwidth["domain"]),
        ("weights of one update", _bytes(size["value"])),
        ("bandwidth into the engine's memory", f"{_bytes(bandwidth['value'])}/s, n={bandwidth['n']} updates"),
        ("longest pause of an engine", f"{number(pause['value'])} s" if pause else "not measured"),
        ("share of a step", f"{_percent(share['value'])}, bound {_percent(bound)}"),
        ("bandwidth that the bound asks for", f"{_bytes(size['value'] / (bound * known.step_s))}/s, all counted"),
    ]
    seconds = size["value"] / bandwidth["value"]
    fits = share["value"] <= bound
    because = (
        f"{bandwidth['domain']} moves {_bytes(size['value'])} in {number(seconds)} s; publishing and moving take "
        f"{_percent(share['value'])} of a step, {'within' if fits else 'above'} {_percent(bound)}"
    )
    return say("pass" if fits else "fail", because, [*_facts(known, rows), *compared])


def placement(known: Known, config: ReviewConfig) -> Finding:
    """Idle: colocated devices are idle while neither side works, separate pools while their own side does not."""
    engines, trainer, bound = known.row("engine_idle_share"), known.row("trainer_idle_share"), config.max_idle_share
    say = _about(
        "placement",
        "Was placement chosen with its idle time in view?",
        f"idle devices, bound {_percent(bound)} (review.max_idle_share): the other cluster.placement, or "
        f"rl.max_staleness above 0, which lets engines sample while the trainer works",
    )
    if engines is None or trainer is None:
        return say("unknown", "the idle time of this target's training was not measured: train it with `lockstep rl`")
    chosen, apart = engines["domain"], (engines["value"], trainer["value"])
    together = max(0.0, sum(apart) - 1)  # shares in which each is idle; both at once is what remains
    idle = together if chosen == "colocated" else max(apart)
    facts = _facts(
        known,
        [
            ("placement", chosen),
            ("engines sample nothing", f"{_percent(apart[0])} of a step"),
            ("the trainer waits", f"{_percent(apart[1])} of a step"),
            ("colocated, devices would be idle", _percent(together)),
            ("on pools of their own", f"engines {_percent(apart[0])}, trainer {_percent(apart[1])}"),
        ],
    )
    fits = idle <= bound
    because = (
        f"{chosen}: devices are idle {_percent(idle)} of a step, {'within' if fits else 'above'} {_percent(bound)}"
    )
    return say("pass" if fits else "fail", because, facts)


def mismatch(known: Known, config: ReviewConfig) -> Finding:
    """Monitored: each step of the training has a k3, none above the bound that stops a run."""
    bounds = MismatchBounds(**known.training.get("mismatch", {}))
    say = _about(
        "mismatch",
        "Is the mismatch of engine and trainer monitored, with its history?",
        "a step without a k3, or with one above rl.mismatch.stop_k3",
    )
    steps = known.measured.steps
    if steps.empty or not known.training:
        return say("unknown", "this target was not trained here: train it with `lockstep rl`")
    stop, warn = bounds.stop_k3, bounds.warns(known.engine["dtype"], known.training["trainer_dtype"])["k3"]
    worst, missing = float(steps["k3"].max()), int(steps["k3"].isna().sum())
    rows = [
        ("steps with a k3", f"{len(steps) - missing} of {len(steps)}"),
        ("worst k3", f"{number(worst)} nats per token; bounds {number(warn)} warns, {number(stop)} stops"),
        ("correction", f"{known.training['correction']}, at most {number(known.training['correction_high'])}"),
    ]
    history = [
        Fact(
            name=f"history: {past.label}",
            value=f"worst k3 {number(past.k3)}, {past.marked} of {past.steps} steps marked",
            source=past.label,
        )
        for past in known.past
    ]
    kept = not missing and worst <= stop
    because = f"worst k3 {number(worst)} of {len(steps)} steps" + (f", {missing} without one" if missing else "")
    return say("pass" if kept else "fail", because, [*_facts(known, rows), *history])


def rollouts(known: Known, config: ReviewConfig) -> Finding:
    """Tuned: requests decode rather than wait, with room in the cache, prompts are found cached, none is preempted."""
    figures = {f: known.row(f) for f in ("decode_share", "kv_cache_peak", "preemptions", "prefix_hit_rate")}
    length, speed = known.row("rollout_length_max"), known.row("rollout_tokens_per_second")
    say = _about(
        "rollouts",
        "Are rollouts tuned for long generations?",
        f"a run with answers of {config.long_tokens} tokens (review.long_tokens) whose decode share is at least "
        f"{_percent(config.min_decode_share)} and whose cache is at most {_percent(config.max_kv_cache)} full: "
        f"engine.max_concurrent_sequences, engine.kv_cache_gib and engine.gpu_memory_fraction decide",
    )
    if figures["decode_share"] is None or length is None or speed is None:
        return say(
            "unknown", "the engines' load was not measured in this target's training: train it with `lockstep rl`"
        )
    decode, peak = figures["decode_share"]["value"], figures["kv_cache_peak"]
    rows = [
        ("longest answer", f"{number(length['value'])} tokens"),
        ("speed", f"{number(speed['value'])} tokens/s"),
        ("decode share", f"{_percent(decode)}, bound {_percent(config.min_decode_share)}"),
        ("KV cache at the peak", _percent(peak["value"]) if peak else "not seen in use"),
        ("preemptions", _count(figures["preemptions"])),
        ("prefix hits", _percent(figures["prefix_hit_rate"]["value"]) if figures["prefix_hit_rate"] else "none asked"),
    ]
    facts = _facts(known, rows)
    crowded = peak is not None and peak["value"] > config.max_kv_cache
    if crowded or decode < config.min_decode_share:
        what = (
            f"the cache is {_percent(peak['value'])} full"
            if crowded
            else f"requests decode {_percent(decode)} of their time"
        )
        return say("fail", what, facts)
    if length["value"] < config.long_tokens:
        return say("unknown", f"no answer was longer than {number(length['value'])} tokens", facts)
    return say("pass", f"{_percent(decode)} of the requests' time is decoding, with room in the cache", facts)


def acceptance(known: Known, config: ReviewConfig) -> Finding:
    """Measured: on each domain of the traffic, on enough drafts, and not slower where it is served."""
    say = _about(
        "acceptance",
        "Is acceptance known on traffic like production's?",
        f"at least {config.min_drafts} drafts in each domain (review.min_drafts, drafter.eval_prompts) of traffic that "
        f"drafter.traffic names, your own captured requests among it; a released drafter that makes serving faster",
    )
    rows = known.rows("acceptance_length", "drafter")
    if rows.empty:
        return say("unknown", "no drafter of this target was measured: make one with `lockstep drafter`")
    drafter, released = known.versions["drafter"], "drafter" in known.versions["release"].parts
    facts = [
        (f"acceptance, {r['domain']}", f"{number(r['value'])} tokens per pass, {_interval(r)}n={r['n']} drafts")
        for r in rows.to_dict("records")
    ]
    speedup = known.row("speculation_speedup", "drafter")
    if speedup is not None:
        facts.append(("speedup by speculation", f"{number(speedup['value'])}×"))
    quant = known.row("quant_acceptance_length", "quant")
    if quant is not None:
        facts.append(("on the quant", f"{number(quant['value'])} tokens per pass, n={quant['n']} drafts"))
    facts.append(
        ("released", "yes" if released else "no: " + known.versions["release"].tags.get("lockstep.left_out", ""))
    )
    listed = _facts(known, facts, "drafter")
    few = [r["domain"] for r in rows.to_dict("records") if r["n"] < config.min_drafts]
    if few:
        return say("unknown", f"fewer than {config.min_drafts} drafts on {', '.join(few)}", listed)
    if released and speedup is not None and speedup["value"] <= 1:
        return say("fail", f"{drafter.label} is served although it makes serving slower", listed)
    domains = [d for d in rows["domain"] if d != "all"]
    left = "" if released else "; it was left out of the release by its figures"
    return say("pass", f"{drafter.label} was measured on {', '.join(domains) or 'its traffic'}{left}", listed)


def trigger(known: Known, config: ReviewConfig) -> Finding:
    """In place: an enabled automation starts the drafter's or the quant's flow, and is on for this target. Exercised:
    such a run completed."""
    say = _about(
        "trigger",
        "Is a retrain trigger in place, and has it been exercised?",
        f"`lockstep automate`, which lets automations start {' and '.join(RETRAINS)}, and a run that completed within "
        f"{config.max_age_days:g} days (review.max_age_days)",
    )
    armed = [t for t in known.triggers if t.enabled and set(t.starts) & set(RETRAINS)]
    ended = [r for r in known.triggered if r.flow in RETRAINS and r.state == "Completed"]
    facts = [Fact(name=t.name, value=f"starts {', '.join(t.starts)}", source="Prefect automation") for t in armed]
    facts += [Fact(name=f"run of {r.flow}", value=f"{r.state} {_day(r.ended)}, started by {r.automation}", source=r.url)
              for r in ended[:3]]  # fmt: skip
    if not armed or not known.automated:
        what = "no enabled automation" if not armed else "`lockstep automate` is off for this target: no event"
        return say("fail", f"{what} starts the refresh of a drafter or quant", facts)
    if not ended:
        return say("unknown", f"{armed[0].name} is in place, but has started no run that completed", facts)
    return say("pass", f"{ended[0].automation} started {ended[0].flow}, which completed", facts)


def automation(known: Known, config: ReviewConfig) -> Finding:
    """End to end: no person started what led to a release, a whole loop or a chain of events."""
    days = f"{config.max_age_days:g} days"
    say = _about(
        "automation",
        "Is the loop automated end to end?",
        f"a loop that a schedule or automation started, or a release that events led to, which ended within {days}",
    )
    chained = next((r for r in known.triggered if r.flow == "release" and r.state == "Completed"), None)
    facts = []
    if chained:
        facts.append(Fact(name="release by events", value=f"{chained.run}, {_day(chained.ended)}", source=chained.url))
    loop, started = known.loop, known.started
    missing = []
    if loop is not None:
        where = started.url if started else f"run {loop.key}"
        phases = [phase for phase in PHASES if phase in (loop.outcome or {}).get("phases", {})]
        missing = [phase for phase in PHASES if phase not in phases]
        minutes = (loop.finished - loop.started).total_seconds() / 60
        facts += [
            Fact(name="last loop", value=f"{loop.key}, {loop.status} {_day(loop.finished)}", source=where),
            Fact(name="phases", value=", ".join(phases), source=where),
            Fact(name="took", value=f"{number(minutes)} min", source=where),
            Fact(name="started by", value=(started.automation or started.by) if started else "not known", source=where),
            Fact(name="interruptions", value=str(max(0, len(loop.flow_run_ids) - 1)), source=where),
        ]
    if loop is not None and (loop.status not in ("finished", "refused") or missing):
        return say("fail", f"{loop.key} did not get through {', '.join(missing) or 'its phases'}", facts)
    if chained:
        return say("pass", f"{chained.automation} started {chained.run}, which released", facts)
    if loop is None:
        return say("unknown", f"no loop has ended in the last {days}: `lockstep loop` runs one", facts)
    if started is None or started.by == "person":
        return say("unknown", f"{loop.key} ran through by itself, but a person had started it", facts)
    return say("pass", f"{loop.key} was started by {started.automation or 'its schedule'} and ran through", facts)


QUESTIONS = (weight_sync, placement, mismatch, rollouts, acceptance, trigger, automation)


def _about(key: str, question: str, change: str):
    def say(verdict: Verdict, because: str, facts: Sequence[Fact] = ()) -> Finding:
        return Finding(key=key, question=question, verdict=verdict, because=because, facts=list(facts), change=change)

    return say


def _facts(known: Known, rows: Sequence[tuple[str, str]], kind: str = "target") -> list[Fact]:
    source = known.source(kind)
    return [Fact(name=name, value=value, source=source) for name, value in rows]


def _percent(share: float) -> str:
    return f"{number(100 * share, 2)}%"


def _count(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    return f"{number(row['value'])} in {row['n']} rollouts, those by weight updates among them"


def _interval(row: dict[str, Any]) -> str:
    return f"[{number(row['low'])}, {number(row['high'])}], " if row["low"] == row["low"] else ""


def _bytes(count: float) -> str:
    return f"{number(count / GIB)} GiB" if count >= GIB else f"{number(count / 2**20)} MiB"


def _day(moment) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC" if moment else ""
