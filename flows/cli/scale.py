"""`lockstep rl scale N`: more or fewer rollout engines for a run that is going on, from any terminal."""

import time
from typing import Annotated

import typer

from flows.cli.exits import Stop
from infra.cluster.control import Control
from infra.services import runs

POLL_S = 0.5
FLOWS = ("rl", "loop")


def scale(
    count: Annotated[int, typer.Argument(help="Rollout engines that the run shall use.", min=1, metavar="N")],
    run: Annotated[str | None, typer.Option(help="Which run, where several are going on.", metavar="KEY")] = None,
    wait: Annotated[bool, typer.Option(help="Follow until the engines serve or have left.")] = True,
) -> None:
    """Use N rollout engines from now on: new ones join with the current weights, those beyond finish what they do."""
    going_on = _running(run)
    control = Control(going_on.folder / "rl")
    before = control.state()
    control.ask(count)
    if before is None:
        print(f"the run has no engines yet: it starts with {count}")
        return
    told = len(before["lines"])
    while wait:
        state = control.state()
        for line in state["lines"][told:]:
            print(line)
        told = max(told, len(state["lines"]))
        if state["wanted"] == count and state["refused"]:
            raise Stop(f"the run keeps {state['serving']} engines: {state['refused']}")
        if (state["wanted"], state["serving"], state["draining"]) == (count, count, 0):
            print(f"{count} engines serve")
            return
        if not runs.live(going_on):
            raise Stop("the run has ended meanwhile")
        time.sleep(POLL_S)


def _running(key: str | None) -> runs.Run:
    found = [run for run in runs.every() if run.flow in FLOWS and (run.folder / "rl").is_dir() and runs.live(run)]
    chosen = [run for run in found if key in (None, run.key)]
    if not chosen:
        raise Stop(f"no run {key} is going on" if key else "no run with an rl phase is going on on this machine")
    if len(chosen) > 1:
        raise Stop(f"several runs are going on: name one with --run, of {', '.join(run.key for run in chosen)}")
    return chosen[0]
