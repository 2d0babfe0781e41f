"""Release: gather the evidence, judge it, serve what may be released, and make it the champion."""

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.approval import ask
from flows.outcome import Outcome, run_name
from flows.pages import show_page, show_table
from infra.config.flows import ReleaseFlowConfig
from infra.lineage.announce import PROMOTED, REFUSED, announce
from infra.lineage.announce import tell as emit
from infra.lineage.lineage import Lineage
from infra.lineage.runs import Run
from infra.services.progress import report
from infra.services.runs import Refused, RunKey, claim, keep_outcome
from infra.store.refs import ArtifactRef
from tasks.release.answers import Answer
from tasks.release.decision import Decision
from tasks.release.gates import Verdict
from tasks.release.steps import (
    choose_candidate,
    gather_evidence,
    judge_by_gates,
    keep_record,
    mark_judged,
    refuse,
    register,
    serve_release,
    still_missing,
)
from tasks.release.takeover import after_trial, make_champion, served_by_fleet, stage, take_back, try_on_share
from tasks.release.text import markdown, question, rows


class ReleaseOutcome(Outcome):
    """What a release came to. release, drafter, quant: labels, null where there is none.

    record: artifact with evidence, judgement and answers. address: where the fleet serves, empty without one.
    """

    release: str | None
    target: str
    drafter: str | None
    quant: str | None
    refused: bool
    decision: Decision
    verdicts: list[Verdict]
    served: list[Answer]
    record: ArtifactRef
    address: str = ""


@flow(name="release", flow_run_name=run_name)
def release(
    config: ReleaseFlowConfig,
    run: RunKey | None = None,
    parent_run: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    quant: str | None = None,
    if_complete: bool = False,
) -> ReleaseOutcome:
    """Release a target with its drafter and quant as far as the gates let them, or refuse it.

    target, drafter, quant: labels such as `smol/2`, in place of what `config.release` names.
    if_complete: end at once, without a release, while a part that `config.release` wants is not measured, or when these
    parts were judged before. Triggers say so: the last part to be measured starts the release.
    run, parent_run: the run that this is a phase of, and its MLflow run. Without them a refusal raises Refused.
    """
    name = config.target.name
    lineage, by = Lineage(), "loop" if run else "release"
    if if_complete and (missing := still_missing(name, config.release, target)):
        return Completed(name="Waiting", message=missing)
    with (
        claim("release", config, run, target=target, drafter=drafter, quant=quant) as key,
        lineage.run(key, "release", parent_run, model=name) as mlflow_run,
    ):
        candidate = choose_candidate(name, config.release, target, drafter, quant, key)
        report(f"releasing {', '.join(v.label for v in candidate.versions)}")
        evidence = gather_evidence(candidate, key)
        judgement = judge_by_gates(candidate, evidence, config.release)
        mark_judged(candidate, key)
        decision = judgement.decision
        released = candidate.kept(drafter=decision.drafter, quant=decision.quant)

        served, approval, version, tried = None, None, None, None
        in_fleet = decision.target and served_by_fleet(name)
        if decision.target:
            served = stage(released, config, key) if in_fleet else serve_release(released, config, key)
        record = keep_record(candidate, evidence, judgement, served)
        if served and config.release.approval == "person":
            title = f"To be approved: {', '.join(v.label for v in released.versions)}"
            tell(title, decision, judgement.verdicts, served.answers, mlflow_run)
            links = {"verdicts, figures and answers in MLflow": mlflow_run.url, "this run": flow_run.ui_url or ""}
            asked = question(released.versions, decision, judgement.verdicts, links)
            approval = ask(key, asked, config.release.approval_timeout_s)
            decision = decision if approval.approved else decision.rejected(approval.text)
        if decision.target:
            version = register(released, judgement, record, config, mlflow_run.id, approval)
            tried = try_on_share(released, version, config, key) if in_fleet else None
            decision = after_trial(decision, tried)
        if decision.target:
            make_champion(released, version, tried, config)
            announce(lineage, PROMOTED, version, by=by)
            title = f"Released {version.label}: {', '.join(v.label for v in released.versions)}"
        else:
            refuse(candidate, decision.refusal, record)
            if in_fleet:
                take_back(name, version, tried)
            about = {"release": version and version.label, "reason": decision.refusal, "run": key}
            emit(REFUSED, key, candidate.target, candidate.target.label, by, about)
            released = candidate.kept(drafter=False, quant=False)
            title = f"Refused {candidate.target.label}"

        outcome = ReleaseOutcome(
            run=key,
            mlflow_run_id=mlflow_run.id,
            spans=served.spans if served else {},
            evidence=evidence,
            release=version and version.label,
            target=candidate.target.label,
            drafter=released.drafter and released.drafter.label,
            quant=released.quant and released.quant.label,
            refused=not decision.target,
            decision=decision,
            verdicts=[*judgement.verdicts, *(tried.judgement.verdicts if tried else [])],
            served=served.answers if served else [],
            record=record,
            address=tried.address if tried else "",
        )
        tell(title, decision, judgement.verdicts, outcome.served, mlflow_run)
        mlflow_run.set_tags(
            {f"{v.kind}_version": v.label for v in [*candidate.versions, *([version] if version else [])]}
        )
        if run is None:
            keep_outcome(key, outcome)
            if outcome.refused:
                raise Refused(decision.refusal)
        return outcome


def tell(title: str, decision: Decision, verdicts: list[Verdict], answers: list[Answer], mlflow_run: Run) -> None:
    """Show the verdicts and answers on the run's page in Prefect and in MLflow."""
    show_table("gates", title, rows(verdicts))
    show_page("release", title, markdown(title, decision, verdicts, answers), mlflow_run)
