"""Watch: measure whether the drafter still fits its target and its traffic, and say what has to be done about it."""

from prefect import flow

from flows.outcome import Outcome, run_name
from flows.pages import show_page, show_table
from flows.traffic import traffic
from infra.config.flows import DrafterFlowConfig, WatchFlowConfig
from infra.lineage.announce import DRIFTED, MEASURED, announce, tell
from infra.lineage.lineage import Lineage, Version
from infra.lineage.runs import Run
from infra.services.progress import report
from infra.services.runs import RunKey, claim, keep_outcome
from tasks.drafter.drift import Drift
from tasks.drafter.drift_text import markdown, metrics, records
from tasks.drafter.steps import KIND_TAG
from tasks.drafter.traffic import Traffic
from tasks.drafter.watch import Seen, Watched, choose_watched, look, unseen, write_evidence


class WatchOutcome(Outcome):
    """What watching came to. target, drafter: labels of what was measured together; drafter: None where there is none.

    kept: label of the drafter that may be released with this target, None when it has to be trained.
    """

    target: str
    drafter: str | None
    drift: Drift
    kept: str | None


@flow(name="watch", flow_run_name=run_name)
def watch(
    config: WatchFlowConfig, run: RunKey | None = None, parent_run: str | None = None, target: str | None = None
) -> WatchOutcome:
    """Measure the drafter that would serve a target version, and decide: keep it, train it on, or train it anew.

    A drafter that is kept is linked to the target with the evidence; one that drifted is announced to Prefect.
    target: a label such as `smol/2`, in place of `config.watch.target`. run, parent_run: the run that this is a phase
    of, and its MLflow run.
    """
    name, lineage = config.target.name, Lineage()
    with (
        claim("watch", config, run, target=target) as key,
        lineage.run(key, "watch", parent_run, model=name) as mlflow_run,
    ):
        watched = choose_watched(name, config.watch.target, target, key)
        asked = watched.drafter.label if watched.drafter else "no drafter"
        report(f"{asked} on {watched.on}")
        prompts = prompts_for(watched, config)
        seen = look(watched, prompts, config, key)
        kept = keep(lineage, watched, seen.drift, config, mlflow_run)
        evidence = write_evidence(watched, subject(watched, kept), seen, prompts)
        about = kept or (watched.drafter if watched.fresh and watched.drafter else watched.target)
        about = lineage.attach_evidence(about, evidence)

        outcome = WatchOutcome(
            run=key,
            mlflow_run_id=mlflow_run.id,
            spans=seen.spans,
            evidence=evidence,
            target=watched.target.label,
            drafter=watched.drafter and watched.drafter.label,
            drift=seen.drift,
            kept=kept and kept.label,
        )
        show(f"{asked} on {watched.on}", seen, mlflow_run)
        mlflow_run.set_tags(
            {
                "target_version": outcome.target,
                "drafter_version": outcome.drafter or "",
                "decision": seen.drift.decision,
            }
        )
        by = "watch" if run is None else "loop"
        if seen.drift.drifted:
            drifted(watched, seen.drift, key, by)
        elif not watched.fresh:
            announce(lineage, MEASURED["drafter"], about, by=by)
        if run is None:
            keep_outcome(key, outcome)
        return outcome


def prompts_for(watched: Watched, config: WatchFlowConfig) -> Traffic:
    """The prompts that drafters of this target are measured on; fresh ones are others, which none is trained on."""
    settings = config.narrow(DrafterFlowConfig)
    usual = traffic(settings, watched.target.artifact)
    if not watched.fresh:
        return usual
    reseeded = settings.drafter.model_copy(update={"seed": watched.seed})
    other = traffic(settings.model_copy(update={"drafter": reseeded}), watched.target.artifact)
    return unseen(usual, other)


def keep(lineage: Lineage, watched: Watched, drift: Drift, config: WatchFlowConfig, mlflow_run: Run) -> Version | None:
    """The drafter's version that names the watched target, registered unless there is one; None when it drifted."""
    drafter, target = watched.drafter, watched.target
    if drift.drifted or drafter is None:
        return None
    if drafter.parts["target"] == target.label:
        return drafter
    tags = {KIND_TAG: drafter.tags[KIND_TAG]} if KIND_TAG in drafter.tags else {}
    return lineage.register_drafter(
        target.name, drafter.artifact, target=target, parent=drafter, run_id=mlflow_run.id, config=config, tags=tags
    )


def subject(watched: Watched, kept: Version | None) -> str:
    """The evidence's name for what was measured. A drafter that was not kept is not the target's: its figures must not
    be taken for those of one that is."""
    if kept is not None:
        return kept.subject
    if watched.drafter is None:
        return watched.target.subject
    return watched.drafter.subject if watched.fresh else f"{watched.drafter.subject} on {watched.target.subject}"


def show(title: str, seen: Seen, mlflow_run: Run) -> None:
    """Show the decision and its figures on the run's page in Prefect, and keep them in MLflow."""
    seconds = sum(seen.spans.values())
    if seen.drift.now:
        show_table("drift", title, records(seen.drift))
    show_page("watch", title, markdown(title, seen.drift, seconds), mlflow_run)
    mlflow_run.log_metrics(metrics(seen.drift, seconds))
    report(f"{seen.drift.decision}: {seen.drift.reason}")


def drifted(watched: Watched, drift: Drift, key: RunKey, by: str) -> None:
    """Tell Prefect that the drafter has to be trained, and how: the trigger of the drafter's deployment."""
    about = {
        "drafter": watched.drafter and watched.drafter.label,
        "decision": drift.decision,
        "warm_start": drift.decision == "refresh",
        "reason": drift.reason,
        "lost": drift.lost,
        "run": key,
    }
    tell(DRIFTED, key, watched.drafter or watched.target, watched.target.label, by, about)
