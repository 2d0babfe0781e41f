"""What runs by itself, and a person's word on what waits for one."""

import getpass
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.exits import FAILED, USAGE, Stop
from flows.cli.run import FLOWS, Files, Overrides, Preset
from infra.config.flows import Settings
from infra.config.load import load
from infra.services import environment
from infra.services.standing import Standing

NIGHTLY_RL, HOURLY_WATCH = "rl/nightly", "watch/hourly"

Run = Annotated[str | None, typer.Argument(help="Its name or id in Prefect; not needed while only one waits.")]
Who = Annotated[str | None, typer.Option("--name", help="Who decides; your user name if not given.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(automate)
    app.command()(approve)
    app.command()(reject)


def automate(
    preset: Preset = None,
    config: Files = [],  # noqa: B006  (typer copies it)
    overrides: Overrides = [],  # noqa: B006
    rl: Annotated[bool, typer.Option("--nightly-rl", help="Train the target every night.")] = False,
    watch: Annotated[bool, typer.Option("--hourly-watch", help="Measure the drafter every hour.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run whose process died.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Nothing runs by itself, and nobody is told.")] = False,
) -> None:
    """Let events and schedules run these settings: a registered target is watched, quantized and released by itself.

    LOCKSTEP_NOTIFY_URL or LOCKSTEP_NOTIFY_BLOCK, where set, is told of failures, drift and refusals.
    """
    settings = None if off else load(Settings, preset=preset, files=config, overrides=overrides)
    environment.apply()
    from infra.services import automations, deployments

    if settings is None:
        Standing.forget()
    else:
        configs = {n: settings.narrow(kind).model_dump(mode="json") for n, (kind, _) in FLOWS.items()}
        schedules = [name for name, on in ((NIGHTLY_RL, rl), (HOURLY_WATCH, watch)) if on]
        Standing(
            target=settings.target.name, configs=configs, folder=Path.cwd(), schedules=schedules, resume=resume
        ).write()
    _server()
    deployments.prepare()
    deployments.deploy(lambda line: print(line, file=sys.stderr))
    if settings is None:
        automations.tell_nobody()
        print("nothing runs by itself, and nobody is told")
        return
    try:
        told = automations.notify()
    except ValueError as error:
        raise Stop(str(error), code=USAGE) from None
    print(f"a registered version of {settings.target.name} is watched and quantized; what is measured is released")
    for schedule in schedules:
        print(f"on: {schedule}")
    if resume:
        print("a crashed run is continued")
    if told:
        print(f"told of failures, drift and refusals: {told}")


def approve(run: Run = None, name: Who = None, reason: Annotated[str, typer.Option(help="Why.")] = "") -> None:
    """Let a release that waits for a person go on."""
    _say(run, "approve", name, reason)


def reject(run: Run = None, name: Who = None, reason: Annotated[str, typer.Option(help="Why.")] = "") -> None:
    """End a release that waits for a person; who did and why is kept with the target."""
    if not reason:
        raise Stop("say why: --reason", code=USAGE)
    _say(run, "reject", name, reason)


def _say(run: str | None, decision: str, name: str | None, reason: str) -> None:
    environment.apply()
    client = _server()
    from infra.services import crashes
    from infra.services.approvals import answer, waiting

    crashes.settle()
    found = [flow_run for flow_run in waiting(client) if run in (None, flow_run.name, str(flow_run.id))]
    if not found:
        raise Stop(
            f"no release waits for a person{f' under the name {run}' if run else ''}: `lockstep status` shows what runs"
        )
    if len(found) > 1:
        raise Stop(
            f"several releases wait, name one: {', '.join(f'{flow_run.id} ({flow_run.name})' for flow_run in found)}",
            code=USAGE,
        )
    refused = answer(client, found[0], {"decision": decision, "name": name or getpass.getuser(), "reason": reason})
    if refused:
        raise Stop(f"{found[0].name} did not take it: {refused}", code=FAILED)
    print(f"{found[0].name}: {decision} by {name or getpass.getuser()}")


def _server() -> Any:
    """A client of the Prefect server. Raises Stop where none answers."""
    import os

    if "PREFECT_API_URL" not in os.environ:
        raise Stop("no services are running: start them with `lockstep up`")
    from prefect.client.orchestration import get_client

    client = get_client(sync_client=True)
    if client.api_healthcheck() is not None:
        raise Stop(f"the Prefect server at {client.api_url} does not answer: `lockstep up` starts it")
    return client
