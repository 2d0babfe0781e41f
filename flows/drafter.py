"""Drafter: learn the target's own answers, and measure what the engine accepts of its proposals."""

from prefect import flow

from flows.outcome import Outcome, run_name
from flows.pages import show_page, show_table
from flows.traffic import traffic
from infra.config.flows import DrafterFlowConfig
from infra.lineage.announce import MEASURED, announce
from infra.lineage.lineage import Lineage
from infra.services.progress import report
from infra.services.runs import RunKey, claim, keep_outcome
from tasks.drafter.kinds import kind
from tasks.drafter.steps import KIND_TAG, answer_prompts, choose, measure_drafter, read_evidence, write_evidence
from tasks.drafter.text import markdown, records, total
from tasks.evaluate.evidence import metrics


class DrafterOutcome(Outcome):
    """What making a drafter came to. drafter, target: labels; started_from: the drafter it was warmed from, if any.

    acceptance_before, acceptance: acceptance length by domain; the former of the drafter it was warmed from.
    """

    drafter: str
    target: str
    started_from: str | None
    acceptance_before: dict[str, float]
    acceptance: dict[str, float]


@flow(name="drafter", flow_run_name=run_name)
def drafter(
    config: DrafterFlowConfig,
    run: RunKey | None = None,
    parent_run: str | None = None,
    target: str | None = None,
    warm_start: bool | None = None,
) -> DrafterOutcome:
    """Make a drafter for a target from its own answers, and measure what the engine accepts of its proposals.

    target: a label such as `smol/2`; the newest version by default. warm_start: in place of that of `config.drafter`; a
    drafter that drifted too far is trained from nothing. run, parent_run: the run that this is a phase of, and its
    MLflow run.
    """
    name, lineage = config.target.name, Lineage()
    warm_start = config.drafter.warm_start if warm_start is None else warm_start
    with (
        claim("drafter", config, run, target=target) as key,
        lineage.run(key, "drafter", parent_run, model=name) as mlflow_run,
    ):
        chosen = choose(config.target, warm_start, target, key, config.drafter.kind)
        report(f"a drafter for {chosen.target.label}")
        prompts = traffic(config, chosen.target.artifact)
        answers = answer_prompts(chosen.target, prompts, config, key)
        made = kind(config.drafter.kind).make(chosen.target, chosen.previous, answers, config, key)
        version = lineage.register_drafter(
            name,
            made.drafter,
            target=chosen.target,
            parent=chosen.previous,
            inputs=[made.states] if made.states else [],
            run_id=mlflow_run.id,
            config=config,
            tags={KIND_TAG: config.drafter.kind},
        )

        label, expected = version.subject, made.result and made.result.expected
        before = None
        if chosen.previous:  # one made from nothing begins at what the training curve says
            start = chosen.previous.artifact
            before = measure_drafter(chosen.target, start, label, prompts, None, config, suffix="_before")
        after = measure_drafter(chosen.target, made.drafter, label, prompts, expected, config)
        evidence = write_evidence(
            chosen.target,
            version,
            made.result,
            made.captured_tokens,
            made.states,
            answers.plain,
            before,
            after,
            prompts,
        )
        version = lineage.attach_evidence(version, evidence)
        announce(lineage, MEASURED["drafter"], version, by="drafter" if run is None else "loop")

        table, curve = read_evidence(evidence)
        lengths = table[table["figure"].isin(["acceptance_length", "acceptance_length_before"])]
        by_figure = {f: dict(zip(g["domain"], g["value"], strict=True)) for f, g in lengths.groupby("figure")}
        outcome = DrafterOutcome(
            run=key,
            mlflow_run_id=mlflow_run.id,
            spans=total(answers.spans, made.spans, before.spans if before else {}, after.spans),
            evidence=evidence,
            drafter=version.label,
            target=chosen.target.label,
            started_from=chosen.previous and chosen.previous.label,
            acceptance_before=by_figure.get("acceptance_length_before", {}),
            acceptance=by_figure.get("acceptance_length", {}),
        )
        mlflow_run.log_metrics(metrics(table))
        mlflow_run.log_steps(curve)
        mlflow_run.set_tags({"target_version": outcome.target, "drafter_version": outcome.drafter})
        title = f"{outcome.drafter} for {outcome.target}"
        show_table("acceptance", title, records(table))
        show_page("drafter", title, markdown(title, table), mlflow_run)
        report(title)
        if run is None:
            keep_outcome(key, outcome)
        return outcome
