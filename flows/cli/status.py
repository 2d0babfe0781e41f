"""`lockstep status`: what stands now, at a glance."""

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import typer

from flows.cli.books import Json, Name, newest_target
from infra.services import catalog, durations, environment, local, runs
from infra.services.record import Record
from infra.services.runs import Run
from infra.serving.state import State

MARK = {"pass": "✓", "fail": "✗", "undecided": "?"}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(status)


def status(name: Name = None, as_json: Json = False) -> None:
    """Show the champion, what runs, the last verdicts, drift, idle pools, the last loop's cost, and the services."""
    environment.apply()
    every = runs.every()
    facts: dict[str, Any] = {
        "services": {r.name: {"address": r.address, "answers": catalog.healthy(r)} for r in Record.all()},
        "running": [_running(run) for run in every if run.status == "open" and runs.live(run)],
        "interrupted": [run.key for run in every if run.status == "open" and not runs.live(run)],
    }
    if every:
        facts |= _standing(name or newest_target())
    if serving := _serving():
        facts["serving"] = serving
    done = [run for run in every if run.status in ("finished", "refused")]
    if done:
        facts["last"] = {"run": done[-1].key, "status": done[-1].status, "finished": str(done[-1].finished)}
        facts["gates"] = _gates(done)
    print(json.dumps(facts) if as_json else _lines(facts))


def _standing(name: str) -> dict[str, Any]:
    from infra.lineage.lineage import Lineage
    from infra.store.open import open_store
    from tasks.report.glance import glance

    found = glance(Lineage(), open_store(), name).model_dump()
    return {"champion": {"release": found.pop("release")} | found.pop("parts")} | found


def _serving() -> dict[str, Any] | None:
    """What the fleet of this machine serves; None where none runs."""
    record, state = Record.read(local.FLEET), State.read()
    if record is None or state is None or state.pid != record.pid:
        return None
    sides = {"stable": state.stable, "canary": state.canary}
    found = {side: state.pools[key].label for side, key in sides.items() if key in state.pools}
    ready = sum(pool.ready for pool in state.pools.values())
    return found | {
        "address": record.address,
        "ready": ready,
        "share": state.share,
        "cut": state.cut,
        "failed": state.failed,
    }


def _running(run: Run) -> dict[str, Any]:
    about: dict[str, Any] = {"run": run.key, "flow": run.flow, "since": str(run.started)}
    if "PREFECT_API_URL" in environment.variables() and run.flow_run_ids:
        from prefect.client.orchestration import get_client

        from infra.services.follow import Follower

        with get_client(sync_client=True) as client:
            follower = Follower(client, UUID(run.flow_run_ids[-1]))
            follower.look()  # finds the flows that it calls
            news = follower.look()
        about["doing"] = news.doing
        if news.task_started is not None:
            elapsed = (datetime.now(UTC) - news.task_started).total_seconds()
            usual = f", usually {durations.words(news.usual_s)}" if news.usual_s is not None else ""
            about["since_then"] = f"{durations.words(elapsed)}{usual}"
    return about


def _gates(done: list[Run]) -> list[dict[str, Any]]:
    for run in reversed(done):
        verdicts = (run.outcome or {}).get("gates") or (run.outcome or {}).get("verdicts")
        if verdicts:
            return [
                {k: v.get(k) for k in ("name", "domain", "verdict", "value", "comparison", "bound")} for v in verdicts
            ]
    return []


def _lines(facts: dict[str, Any]) -> str:
    blocks = [_target(facts), _runs(facts), _verdicts(facts), _services(facts)]
    width = max(len(name) for block in blocks for name, _ in block)
    return "\n\n".join("\n".join(f"{name:<{width}}  {text}" for name, text in block) for block in blocks if block)


def _target(facts: dict[str, Any]) -> list[tuple[str, str]]:
    champion = facts.get("champion")
    if champion is None:
        return []
    parts = ", ".join(label for kind, label in champion.items() if label and kind != "release")
    rows = [("champion", f"{champion['release']}: {parts}" if champion["release"] else "nothing released yet")]
    if serving := facts.get("serving"):
        where = f"{serving.get('stable', 'nothing yet')} at {serving['address']}/v1"
        canary = f", {serving['canary']} gets {serving['share']}%" if "canary" in serving else ""
        counted = f"{serving['cut']} streams cut, {serving['failed']} requests failed"
        rows.append(("serving", f"{where}{canary}; {serving['ready']} replicas ready, {counted}"))
    if facts["newest"] and facts["newest"] != champion.get("target"):
        rows.append(("newest", f"{facts['newest']}, not released"))
    if facts["acceptance"] is not None:
        rows.append(("acceptance", f"{facts['acceptance']:.2f} tokens per pass"))
    if drift := facts["drift"]:
        rows.append(("drift", f"{drift['decision']}: {drift['reason']} (on {drift['target']}, {drift['ended']} UTC)"))
    else:
        rows.append(("drift", "nobody has looked: `lockstep watch` does"))
    if facts["idle"]:
        rows.append(("idle", ", ".join(f"{pool} {share:.0%}" for pool, share in facts["idle"].items()) + " of a step"))
    if cost := facts["cost"]:
        moved, kept = (f"{cost[what] / 2**20:,.1f} MiB" for what in ("moved", "kept"))
        rows.append(("last cost", f"{cost['seconds']:,.0f} {cost['device']} seconds, {moved} moved, {kept} kept"))
    return rows


def _runs(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for run in facts["running"]:
        since = f" ({run['since_then']})" if "since_then" in run else ""
        rows.append(("running", f"{run['run']}: {run.get('doing', '')}{since}"))
    rows += [("interrupted", f"{key}: the same command continues it") for key in facts["interrupted"]]
    if "last" in facts:
        run, status, finished = (facts["last"][key] for key in ("run", "status", "finished"))
        rows.append(("last run", f"{run} {status} {finished[:16]} UTC"))
    return rows


def _verdicts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for gate in facts.get("gates", []):
        where = f" ({gate['domain']})" if gate["domain"] else ""
        value = "not measured" if gate["value"] is None else f"{gate['value']:.4g}"
        told = f"{gate['name']}{where}: {value}, must be {gate['comparison']} {gate['bound']:g}"
        rows.append((f"gate {MARK[gate['verdict']]}", told))
    return rows


def _services(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, f"{'answers' if service['answers'] else 'does not answer'} {service['address']}".strip())
        for name, service in facts["services"].items()
    ] or [("services", "none were started here: `lockstep up` starts them")]
