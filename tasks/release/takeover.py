"""A new release takes over in the fleet: staged beside the champion, tried on a growing share, then all or nothing."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict

from infra.config.flows import ReleaseFlowConfig
from infra.engine.pin import engine_pin, hardware
from infra.lineage.aliases import promote, roll_back, rolled_back_to, withdraw
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.services.prefect import durable
from infra.services.progress import report
from infra.services.spans import Spans
from infra.serving import client
from infra.serving.client import Fleet, FleetError
from infra.serving.state import SIDE_HEADER, Triple
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.release import live
from tasks.release.answers import Served
from tasks.release.candidate import PRODUCER, Candidate
from tasks.release.decision import Decision
from tasks.release.record import Judgement, judge_rows, keep_rows
from tasks.release.serve import ask
from tasks.release.triple import Serving, triple_of, triple_of_release


class Tried(BaseModel):
    """How a release did beside the champion. judgement: of the live gates over every step. record: both, as evidence of
    the release. address: where the fleet serves."""

    model_config = ConfigDict(frozen=True)

    address: str
    judgement: Judgement
    record: ArtifactRef


def served_by_fleet(name: str) -> bool:
    """Whether a fleet serves the target `name` here."""
    return client.running(name) is not None


@durable(name="stage beside the champion")
def stage(released: Candidate, config: ReleaseFlowConfig, run: str) -> Served:
    """Start the triple beside the champion, without requests, and give its answers to `release.questions`.

    Raises FleetError when it does not start, ServeError when it does not answer; it is taken out again then.
    """
    fleet, spans = _fleet(released.target.name), Spans()
    triple = triple_of(open_store(), released, Serving.of(config))
    with _or_back(fleet):
        with spans.measure("engine_start"):
            fleet.ask(stable=fleet.wish.stable, canary=triple, say=report)
        with spans.measure("engine"):
            before = fleet.pool(triple).counters
            settings = config.release
            asked = ask(fleet.handle, settings.questions, settings.max_new_tokens, {SIDE_HEADER: "canary"})
            answers = asyncio.run(asked)
            counters = fleet.pool(triple).counters.plus(before, -1)
    return Served(answers=answers, accepted=counters.accepted, drafts=counters.drafts, spans=dict(spans.seconds))


@durable(name="try on a share of the requests")
def try_on_share(released: Candidate, release: Version, config: ReleaseFlowConfig, run: str) -> Tried:
    """Give the staged triple a growing share of the requests, and judge it at each step beside the champion. At the
    first failure all requests go back to the champion, and the triple is stopped once its last answer has left.

    Where nothing was served before there is nothing to compare, and no step.
    """
    fleet = _fleet(released.target.name)
    triple, champion = triple_of(open_store(), released, Serving.of(config)), fleet.wish.stable
    subjects = {"live": f"release:{release.label}"}
    gates = [gate for gate in config.release.judged if gate.part == "live"]
    rows: list[dict] = []
    with _or_back(fleet):
        judgement = judge_rows(_table(rows), [], subjects, has_parent=True)
        for share in fleet.config.steps if champion else ():
            fleet.ask(stable=champion, canary=triple, share=share, say=report)
            report(f"{share}% of the requests go to {release.label}")
            golden, longest = config.release.golden, config.release.max_new_tokens
            rows += live.observe(fleet, champion, triple, golden, longest, subject=subjects["live"])
            judgement = judge_rows(_table(rows), gates, subjects, has_parent=True)
            if not judgement.decision.target:
                _back(fleet)
                break
    record = keep_rows(open_store(), _table(rows), judgement, [released.target.artifact], f"{PRODUCER} {run}")
    return Tried(address=fleet.address, judgement=judgement, record=record)


def after_trial(decision: Decision, tried: Tried | None) -> Decision:
    """The gates' decision once live requests have been heard too."""
    if tried is None:
        return decision
    heard = tried.judgement.decision
    warnings = [*decision.warnings, *heard.warnings]
    return (decision if heard.target else heard).model_copy(update={"warnings": warnings})


def make_champion(released: Candidate, release: Version, tried: Tried | None, config: ReleaseFlowConfig) -> None:
    """Move the alias, and all requests with it where a fleet serves the target. May be called again."""
    lineage = Lineage()
    if tried is None:
        promote(lineage, release)
        return
    lineage.attach_evidence(release, tried.record)
    fleet = _fleet(released.target.name)
    promote(lineage, release)
    fleet.ask(stable=triple_of(open_store(), released, Serving.of(config)), say=report)


def take_back(name: str, release: Version | None, tried: Tried | None) -> None:
    """Let the champion of target `name` serve on alone. release: what was refused, the candidate no longer; None where
    nothing was registered yet. tried: what live requests said of it."""
    fleet = client.running(name)
    if fleet:
        _back(fleet)
    if release and tried:
        lineage = Lineage()
        lineage.attach_evidence(release, tried.record)
        lineage.tag(release, {"lockstep.refused": tried.judgement.decision.refusal})
        withdraw(lineage, release)


def go_back(name: str, otherwise: Serving, say: Callable[[str], None]) -> tuple[Version, Version]:
    """Make the previous release of target `name` the champion again: its replicas start beside the champion's, then
    alias and requests move together. otherwise: settings of a release that kept none.

    Returns (champion now, champion before). Raises LineageError when there is nothing to go back to, FleetError when it
    does not start; the champion stays then.
    """
    lineage = Lineage()
    now, _ = rolled_back_to(lineage, name)
    fleet = client.running(name)
    if fleet:
        triple = triple_of_release(lineage, open_store(), now, otherwise)
        with _or_back(fleet):
            fleet.ask(stable=fleet.wish.stable, canary=triple, say=say)
    moved = roll_back(lineage, name)
    if fleet:
        fleet.ask(stable=triple, say=say)
    return moved


def champion_triple(name: str, otherwise: Serving) -> tuple[Version, Triple] | None:
    """The champion release of target `name` and what serves it; None while nothing is released."""
    lineage = Lineage()
    champion = lineage.resolve(f"{name}-release", "champion")
    return champion and (champion, triple_of_release(lineage, open_store(), champion, otherwise))


def _fleet(name: str) -> Fleet:
    fleet = client.running(name)
    if fleet is None:
        raise FleetError(f"the fleet of {name} has ended meanwhile: `lockstep serve`, then the same command again")
    return fleet


@contextmanager
def _or_back(fleet: Fleet) -> Iterator[None]:
    """Whatever goes wrong inside, the champion serves on, alone."""
    try:
        yield
    except BaseException:
        _back(fleet)
        raise


def _back(fleet: Fleet) -> None:
    fleet.wish_for(stable=fleet.wish.stable)


def _table(rows: list[dict]):
    return evidence.table(rows, engine=engine_pin(), hardware=hardware(), command=PRODUCER)
