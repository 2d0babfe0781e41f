"""Commands that run a flow: submitted to its deployment and followed, or run in this terminal with `--local`."""

import importlib
import inspect
import json
import os
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated
from uuid import UUID

import typer

from flows.cli.exits import FAILED, REFUSED, USAGE, Stop
from flows.cli.scale import scale
from infra.config import flows as configs
from infra.config.load import load, presets
from infra.config.plan import make_plan
from infra.services import environment, runs
from infra.services.record import Record
from infra.store import models

POLL_S = 1.0
FINAL_LOOK_S = 30.0  # logs and task states arrive a moment after the run's own end, later on a busy machine
KILLED_LOOK_S = 3.0  # those of a killed one never do
FINAL_POLL_S = 0.2
PREPARED = ("package:", "random:")  # sources that Lockstep makes itself; any other is a folder of the user's

FLOWS = {
    "loop": (configs.LoopConfig, "Run the whole loop: rl, drafter, quantize, release."),
    "rl": (configs.RLFlowConfig, "Post-train the target with reinforcement learning; registers its next version."),
    "drafter": (configs.DrafterFlowConfig, "Train and measure a drafter for a target version."),
    "quantize": (configs.QuantizeFlowConfig, "Quantize a target version and measure the copy."),
    "watch": (
        configs.WatchFlowConfig,
        "Measure whether the drafter fits the newest target, or fresh traffic; keep it or say it drifted.",
    ),
    "release": (configs.ReleaseFlowConfig, "Judge the evidence; serve and promote what passes."),
    "review": (configs.ReviewFlowConfig, "Answer the questions of a design review from a release's evidence."),
}
OWN_COMMAND = ("review",)  # flows whose command is in a file of its own
SUBCOMMANDS = {"rl": [scale]}

Preset = Annotated[str | None, typer.Option(help=f"Settings to start from: {', '.join(presets())}.", metavar="NAME")]
Files = Annotated[list[Path], typer.Option("--config", help="TOML file; given again, later ones win.", metavar="FILE")]
Overrides = Annotated[list[str], typer.Option("--set", help="One setting, such as rl.lr=1e-5.", metavar="KEY=VALUE")]
Local = Annotated[bool, typer.Option("--local", help="Run in this terminal instead of the worker.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the configuration and the plan, run nothing.")]
New = Annotated[bool, typer.Option("--new", help="Start anew instead of continuing an interrupted run.")]
Waive = Annotated[list[str], typer.Option("--waive", help="Let this gate pass, by --by for --reason.", metavar="GATE")]
Json = Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")]


@dataclass
class Request:
    """What the user asked for, as given. module: where the flow is, `flows.NAME` unless said."""

    flow: str
    preset: str | None = None
    files: list[Path] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    local: bool = False
    module: str = ""

    def __post_init__(self) -> None:
        self.module = self.module or f"flows.{self.flow}"

    @property
    def command(self) -> str:
        """The command that asks for the same again."""
        options = [f"--preset {self.preset}"] if self.preset else []
        options += [f"--config {quote(str(file))}" for file in self.files]
        options += [f"--set {quote(override)}" for override in self.overrides]
        options += ["--local"] if self.local else []
        return " ".join(["lockstep", self.flow, *options])


def register(app: typer.Typer) -> None:
    """Add one command per flow to `app`."""
    for name, (_, text) in FLOWS.items():
        if name in OWN_COMMAND:
            continue
        if name in SUBCOMMANDS:
            group = typer.Typer(help=text, invoke_without_command=True)
            group.callback()(_unless_subcommand(_command(name)))
            for command in SUBCOMMANDS[name]:
                group.command()(command)
            app.add_typer(group, name=name)
        else:
            app.command(name, help=text)(_release_command() if name == "release" else _command(name))


def _unless_subcommand(command):
    def run(ctx: typer.Context, **options) -> None:
        if ctx.invoked_subcommand is None:
            command(**options)

    own = inspect.signature(run).parameters["ctx"]
    run.__signature__ = inspect.Signature([own, *inspect.signature(command).parameters.values()])
    run.__annotations__ = {"ctx": typer.Context, **command.__annotations__}
    return run


def _command(name: str):
    def command(
        preset: Preset = None,
        config: Files = [],  # noqa: B006  (typer copies it)
        overrides: Overrides = [],  # noqa: B006
        local: Local = False,
        dry_run: DryRun = False,
        new: New = False,
        as_json: Json = False,
    ) -> None:
        request = Request(name, preset, config, overrides, local)
        settings = load(FLOWS[name][0], preset=preset, files=config, overrides=overrides)
        if not settings.target.source.startswith(PREPARED):
            models.check(Path(settings.target.source))
        plan = make_plan(name, settings)
        if dry_run:
            print(plan.as_json(settings) if as_json else plan.as_text(settings))
            return
        plan.require()
        run_flow(request, settings, new=new, as_json=as_json)

    return command


def _release_command():
    run = _command("release")

    def command(
        preset: Preset = None,
        config: Files = [],  # noqa: B006  (typer copies it)
        overrides: Overrides = [],  # noqa: B006
        waive: Waive = [],  # noqa: B006
        by: Annotated[str | None, typer.Option(help="Who waives.", metavar="NAME")] = None,
        reason: Annotated[str | None, typer.Option(help="Why.", metavar="TEXT")] = None,
        local: Local = False,
        dry_run: DryRun = False,
        new: New = False,
        as_json: Json = False,
    ) -> None:
        if waive:
            if not (by and reason):
                raise Stop("--waive needs --by NAME and --reason TEXT: both are kept in the release", code=USAGE)
            settings = load(configs.ReleaseFlowConfig, preset=preset, files=config, overrides=overrides)
            waivers = [w.model_dump() for w in settings.release.waivers]
            waivers += [{"gate": gate, "by": by, "reason": reason} for gate in waive]
            tables = [", ".join(f"{key} = {json.dumps(value)}" for key, value in w.items()) for w in waivers]
            overrides = [*overrides, f"release.waivers=[{', '.join(f'{{{table}}}' for table in tables)}]"]
        run(preset, config, overrides, local, dry_run, new, as_json)

    return command


def run_flow(request: Request, settings: configs.FlowConfig, *, new: bool, as_json: bool) -> None:
    """Run the flow and show it until it ends. Raises Stop with the exit code unless it completed."""
    if request.local:  # the screen shows the log; Prefect's own console handler would show it twice
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    environment.apply()
    if "PREFECT_API_URL" not in os.environ:
        raise Stop("no services are running: start them with `lockstep up`")
    from prefect.client.orchestration import get_client

    from infra.services import crashes, follow

    if new:
        runs.abandon(request.flow, settings)
    with get_client(sync_client=True) as client:
        _reachable(client)
        crashes.settle()
        start = _run_here if request.local else _submit
        state, flow_run_id = start(client, request, settings)
    if state.is_completed():
        _print_outcome(request.flow, flow_run_id, as_json)
        return
    kind, text = follow.cause(state)
    if kind == runs.Refused.__name__:
        _print_outcome(request.flow, flow_run_id, as_json)
        raise Stop(text, code=REFUSED)
    if state.is_cancelled() or state.is_crashed():
        raise Stop(f"{state.name.lower()}: {text}; `{request.command}` continues it", code=FAILED)
    raise Stop(text, code=FAILED)


def _reachable(client) -> None:
    if (error := client.api_healthcheck()) is not None:
        reason = str(error) or type(error).__name__
        raise Stop(f"the Prefect server at {client.api_url} does not answer ({reason}): `lockstep up` starts it")


def _submit(client, request: Request, settings: configs.FlowConfig):
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
    from prefect.states import Cancelling

    from flows.cli.screen import Screen
    from infra.services import deployments
    from infra.services.follow import Follower

    server = Record.read("prefect")
    if server and str(client.api_url).startswith(server.address):  # our own: its deployments follow the code
        deployments.deploy(lambda line: print(line, file=sys.stderr))
    try:
        deployment = client.read_deployment_by_name(f"{request.flow}/{request.flow}")
    except ObjectNotFound:
        raise Stop(f"the flow {request.flow} is not deployed on this server: run `lockstep up`") from None
    try:
        flow_run = client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"config": settings.model_dump(mode="json")},
            job_variables={"working_dir": os.getcwd()},  # relative paths in the configuration mean the user's folder
        )
    except PrefectHTTPStatusError as error:
        said = " ".join(error.response.text.split())[:300]
        raise Stop(
            f"the server refuses the run, its deployments may be of other code ({said}): `lockstep up`"
        ) from None
    _announce(client, flow_run)
    follower = Follower(client, flow_run.id)
    try:
        return _follow(follower, Screen()), flow_run.id
    except KeyboardInterrupt:
        print("\nstopping the run ...", file=sys.stderr)
        client.set_flow_run_state(flow_run.id, Cancelling())
        return _follow(follower, Screen()), flow_run.id


def _run_here(client, request: Request, settings: configs.FlowConfig):
    import asyncio

    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow as run_prefect_flow

    from flows.cli.screen import Screen
    from infra.services.follow import Follower

    sys.path.insert(0, os.getcwd())  # scorers named by module are found as they are by the worker
    flow = getattr(importlib.import_module(request.module), request.flow)
    flow_run = client.create_flow_run(flow, parameters={"config": settings})
    _announce(client, flow_run)

    screen, ended = Screen(), threading.Event()

    def watch() -> None:
        with get_client(sync_client=True) as own_client:
            _follow(Follower(own_client, flow_run.id), screen, ended)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = run_prefect_flow(flow, flow_run=flow_run, parameters={"config": settings}, return_type="state")
        state = asyncio.run(result) if asyncio.iscoroutine(result) else result
    except KeyboardInterrupt:
        state = client.read_flow_run(flow_run.id).state
    ended.set()
    watcher.join(timeout=_last_look_s(state) + 2 * POLL_S)
    screen.close()
    return state, flow_run.id


def _announce(client, flow_run) -> None:
    page = str(client.api_url).removesuffix("/").removesuffix("/api")
    print(f"{flow_run.name}: {page}/runs/flow-run/{flow_run.id}", file=sys.stderr)


def _follow(follower, screen, ended: threading.Event | None = None):
    """Show the run until it has ended; its final state. ended: set once it has, to be looked at without delay."""
    ended = ended or threading.Event()
    with closing(screen):
        while True:
            news = follower.look()
            screen.show(news)
            deadline = time.monotonic() + _last_look_s(news.state)
            # a crash that was none is taken back by then
            while news.state.is_final() and (not news.whole or news.state.is_crashed()) and time.monotonic() < deadline:
                time.sleep(FINAL_POLL_S)
                news = follower.look()
                screen.show(news)
            if news.state.is_final():
                return news.state
            if ended.wait(POLL_S):
                time.sleep(FINAL_POLL_S)


def _last_look_s(state) -> float:
    return FINAL_LOOK_S if state.is_completed() or state.is_failed() else KILLED_LOOK_S


def _print_outcome(flow: str, flow_run_id: UUID, as_json: bool) -> None:
    from flows.cli.outcomes import text

    run = next((r for r in runs.every(flow) if str(flow_run_id) in r.flow_run_ids), None)
    if run is not None and run.outcome is not None:
        print(json.dumps(run.outcome) if as_json else text(run))
