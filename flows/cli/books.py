"""Commands that read what runs came to, and what stands now."""

import json
from typing import Annotated, Any

import typer

from flows.cli.exits import Stop
from infra.services import environment, local, runs
from infra.services.record import Record
from infra.services.runs import Run
from infra.serving.state import State

Name = Annotated[str | None, typer.Option("--name", help="Target's name; that of the newest run if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(status)
    app.command()(report)


def status(name: Name = None, as_json: Json = False) -> None:
    """Show the services, the champion, and the runs."""
    environment.apply()
    facts: dict[str, Any] = {
        "services": {r.name: {"address": r.address, "answers": local.healthy(r)} for r in Record.all()},
        "running": [_running(run) for run in runs.every() if run.status == "open" and runs.live(run)],
        "interrupted": [run.key for run in runs.every() if run.status == "open" and not runs.live(run)],
    }
    if runs.every():
        facts["champion"] = _champion(name or newest_target())
    if serving := _serving():
        facts["serving"] = serving
    done = [run for run in runs.every() if run.status in ("finished", "refused")]
    if done:
        facts["last"] = {"run": done[-1].key, "status": done[-1].status, "finished": str(done[-1].finished)}
        facts["gates"] = _gates(done)
    print(json.dumps(facts) if as_json else _lines(facts))


def report(
    run: Annotated[str | None, typer.Argument(help="Key of the run; the last finished loop if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a loop came to, and where its report is."""
    if run is not None:
        try:
            found = runs.read(run)
        except FileNotFoundError:
            raise Stop(f"there is no run {run} here: `lockstep status` names the last one") from None
    else:
        loops = [r for r in runs.every("loop") if r.outcome is not None]
        if not loops:
            raise Stop("no loop has finished here yet: `lockstep loop` runs one")
        found = loops[-1]
    if found.outcome is None:
        raise Stop(f"{found.key} has not finished: `lockstep status` shows what runs")
    from flows.cli.outcomes import text

    print(json.dumps(found.outcome) if as_json else text(found))


def newest_target() -> str:
    """Name of the newest run's target. Raises Stop where nothing has run."""
    every = runs.every()
    if not every:
        raise Stop("nothing has run here yet: name the target")
    return every[-1].target


def _champion(name: str) -> dict[str, Any]:
    from infra.lineage.lineage import Lineage

    release = Lineage().resolve(f"{name}-release", "champion")
    if release is None:
        return {"release": None}
    return {"release": release.label} | dict(release.parts)


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


def _running(run: Run) -> dict[str, str]:
    about = {"run": run.key, "flow": run.flow, "since": str(run.started)}
    if "PREFECT_API_URL" in environment.variables() and run.flow_run_ids:
        from uuid import UUID

        from prefect.client.orchestration import get_client

        from infra.services.follow import Follower

        with get_client(sync_client=True) as client:
            follower = Follower(client, UUID(run.flow_run_ids[-1]))
            follower.look()  # finds the flows that it calls
            about["doing"] = follower.look().doing
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
    rows = [
        (f"service {name}", f"{'answers' if s['answers'] else 'does not answer'} {s['address']}".strip())
        for name, s in facts["services"].items()
    ] or [("services", "none were started here: `lockstep up` starts them")]
    champion = facts.get("champion", {})
    if champion:
        parts = ", ".join(f"{kind} {label}" for kind, label in champion.items() if label and kind != "release")
        rows.append(("champion", f"{champion['release']}: {parts}" if champion["release"] else "nothing released yet"))
    if serving := facts.get("serving"):
        where = f"{serving.get('stable', 'nothing yet')} at {serving['address']}/v1"
        canary = f", {serving['canary']} gets {serving['share']}%" if "canary" in serving else ""
        counted = f"{serving['cut']} streams cut, {serving['failed']} requests failed"
        rows.append(("serving", f"{where}{canary}; {serving['ready']} replicas ready, {counted}"))
    rows += [("running", f"{r['run']}: {r.get('doing', '')}") for r in facts["running"]]
    rows += [("interrupted", f"{key}: the same command continues it") for key in facts["interrupted"]]
    if "last" in facts:
        rows.append(("last run", f"{facts['last']['run']} {facts['last']['status']} {facts['last']['finished'][:16]}"))
    for gate in facts.get("gates", []):
        where = f" ({gate['domain']})" if gate["domain"] else ""
        value = "not measured" if gate["value"] is None else f"{gate['value']:.4g}"
        rows.append(
            (
                f"gate {gate['verdict']}",
                f"{gate['name']}{where}: {value}, must be {gate['comparison']} {gate['bound']:g}",
            )
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
