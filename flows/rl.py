"""RL: train the target on verifiable rewards, and register what comes out as its next version."""

from prefect import flow

from flows.outcome import Outcome, run_name
from flows.pages import show_page, show_table
from infra.config.flows import RLFlowConfig
from infra.lineage.announce import REGISTERED, announce
from infra.lineage.lineage import Lineage
from infra.services.progress import report
from infra.services.runs import RunKey, claim, keep_outcome
from tasks.rl.speculating import choose_drafter
from tasks.rl.steps import choose_base, keep_target, read_evidence, train, write_evidence
from tasks.rl.text import markdown, step_records


class RLOutcome(Outcome):
    """What training came to. target, parent: labels of the new version and of the one it was trained from."""

    target: str
    parent: str


@flow(name="rl", flow_run_name=run_name)
def rl(config: RLFlowConfig, run: RunKey | None = None, parent_run: str | None = None) -> RLOutcome:
    """Train the version that `config.target` names and register the result as the target's next version.

    run, parent_run: the run that this is a phase of, and its MLflow run.
    """
    name, lineage = config.target.name, Lineage()
    with claim("rl", config, run) as key, lineage.run(key, "rl", parent_run, model=name) as mlflow_run:
        base = choose_base(config.target, key)
        announce(lineage, REGISTERED, base, by="source")
        drafter = choose_drafter(base, config, key)
        trained = train(base.artifact, config, key, mlflow_run.id, drafter)
        artifact = keep_target(trained, base.artifact, key)
        target = lineage.register_target(name, artifact, parent=base, run_id=mlflow_run.id, config=config)
        evidence = write_evidence(trained, target, config)
        target = lineage.attach_evidence(target, evidence)
        announce(lineage, REGISTERED, target, by="rl" if run is None else "loop")

        outcome = RLOutcome(
            run=key,
            mlflow_run_id=mlflow_run.id,
            spans=trained.spans,
            evidence=evidence,
            target=target.label,
            parent=base.label,
        )
        mlflow_run.set_tags({"target_version": outcome.target, "parent_version": outcome.parent})
        table, steps = read_evidence(evidence)
        title = f"{outcome.target}, trained from {outcome.parent}"
        show_table("rl-steps", title, step_records(steps))
        show_page("rl", title, markdown(title, table), mlflow_run)
        report(title)
        if run is None:
            keep_outcome(key, outcome)
        return outcome
