"""Commands about releases: serve the champion at a stable address, go back to the one before, judge one again."""

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from flows.cli.books import Json, Name, newest_target
from flows.cli.exits import FAILED, REFUSED, USAGE, Stop
from flows.cli.run import Files, Overrides, Preset
from infra.config.flows import ReleaseFlowConfig
from infra.config.load import load
from infra.services import environment, local

Port = Annotated[
    int | None, typer.Option(help="Its port; without it the one it had, `release.fleet.port`, or the next.")
]


class Cluster(StrEnum):
    """Who serves what is rendered: Deployments behind a route of the Gateway API, or KServe."""

    kubernetes = "kubernetes"
    kserve = "kserve"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(serve)
    app.command()(rollback)
    app.command()(rejudge)


def serve(
    preset: Preset = None,
    config: Files = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    port: Port = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop serving; other services stay.")] = False,
    render: Annotated[Cluster | None, typer.Option(help="Print manifests for a cluster instead of serving.")] = None,
    canary: Annotated[str | None, typer.Option(help="With --render: a release beside the champion.")] = None,
    share: Annotated[int, typer.Option(help="With --render: its share of the requests, percent.", min=0, max=100)] = 10,
) -> None:
    """Serve the champion release at a stable address, until `lockstep down`; new releases take over there."""
    if render or canary:
        print(
            _rendered(load(ReleaseFlowConfig, preset=preset, files=config, overrides=overrides), render, canary, share)
        )
        return
    if stop:
        _say("the fleet has ended" if local.stop_serving() else "no fleet runs here")
        return
    settings = load(ReleaseFlowConfig, preset=preset, files=config, overrides=overrides)
    environment.apply()
    from infra.serving.client import running
    from infra.serving.state import Wish
    from tasks.release.takeover import champion_triple
    from tasks.release.triple import Serving

    name = settings.target.name
    champion = champion_triple(name, Serving.of(settings))
    release, triple = champion or (None, None)
    record = local.serve(_say, Wish(name=name, config=settings.release.fleet, stable=triple), port=port)
    if release is None:
        print(f"{record.address}/v1 answers 503 until something of {name} is released: `lockstep release`")
        return
    running(name).ask(stable=triple, say=_say)
    print(f"{record.address}/v1 serves {release.label} as model {name}: {', '.join(release.parts.values())}")


def _rendered(settings: ReleaseFlowConfig, render: Cluster | None, canary: str | None, share: int) -> str:
    if render is None:
        raise Stop("--canary belongs to --render; here a release takes over by `lockstep release`", code=USAGE)
    environment.apply()
    from infra.lineage.lineage import Lineage
    from infra.serving import kubernetes
    from infra.store.open import open_store
    from tasks.release.takeover import champion_triple
    from tasks.release.triple import Serving, triple_of_release

    name, serving = settings.target.name, Serving.of(settings)
    champion = champion_triple(name, serving)
    if champion is None:
        raise Stop(f"nothing of {name} is released: `lockstep release`", code=FAILED)
    found = [champion]
    if canary:
        release = Lineage().get(canary)
        if (release.kind, release.name) != ("release", name):
            raise Stop(f"--canary {canary}: that is no release of {name}, such as {champion[0].label}", code=USAGE)
        found.append((release, triple_of_release(Lineage(), open_store(), release, serving)))
    shares = [100 - share, share] if canary else [100]
    sides = [
        kubernetes.Side(release.label.replace("/", "-"), triple, weight)
        for (release, triple), weight in zip(found, shares, strict=True)
    ]
    make = kubernetes.manifests if render is Cluster.kubernetes else kubernetes.inference_services
    return kubernetes.text(make(name, sides, settings.release.fleet))


def rollback(
    name: Name = None,
    preset: Preset = None,
    config: Files = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Make the previous release the champion again, and serve it: target, drafter and quant together."""
    settings = load(ReleaseFlowConfig, preset=preset, files=config, overrides=overrides)
    environment.apply()
    name = name or newest_target()
    from tasks.release.takeover import go_back
    from tasks.release.triple import Serving

    now, before = go_back(name, Serving.of(settings), _say)
    if as_json:
        print(json.dumps({"champion": now.label, "before": before.label}))
    else:
        print(f"champion is {now.label} again, instead of {before.label}")


def rejudge(
    version: Annotated[str, typer.Argument(help="A release such as smol-release/3, or a refused target.")],
    preset: Preset = None,
    config: Files = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Compute a verdict again from the evidence kept with it; by other gates where a configuration is given."""
    settings = load(ReleaseFlowConfig, preset=preset, files=config, overrides=overrides)
    given = bool(preset or config or overrides)
    environment.apply()
    from infra.lineage.lineage import Lineage
    from infra.store.open import open_store
    from tasks.release.record import judge_again, kept_judgement, record_of
    from tasks.release.text import terminal

    folder = open_store().open(record_of(Lineage().get(version)))
    then, now = kept_judgement(folder), judge_again(folder, settings.release.judged if given else None)
    same = then.verdicts == now.verdicts and then.decision == now.decision
    if as_json:
        print(json.dumps({"same": same, "then": then.model_dump(mode="json"), "now": now.model_dump(mode="json")}))
    else:
        print(terminal(now.decision, now.verdicts))
        print("the same verdict as then" if same else "another verdict than then")
    if not same and not given:
        raise Stop(f"{version}: its evidence does not lead to the verdict that was kept", code=FAILED)
    if not now.decision.target:
        raise Stop(now.decision.refusal, code=REFUSED)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
