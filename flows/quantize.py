"""Quantize: make a quantized copy of a target, and measure in the engine what that costs and gains."""

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.outcome import Outcome, run_name
from flows.traffic import traffic
from infra.config.flows import QuantizeFlowConfig
from infra.lineage.announce import MEASURED, announce
from infra.lineage.lineage import Lineage
from infra.services.progress import report
from infra.services.runs import RunKey, claim, keep_outcome
from tasks.evaluate.evidence import metrics
from tasks.quant.steps import (
    choose,
    look_at_base,
    look_at_quant,
    quantize_weights,
    read_evidence,
    try_drafter,
    write_evidence,
)
from tasks.quant.text import markdown, records, total


class QuantizeOutcome(Outcome):
    """What quantizing came to. quant, target, drafter: labels; drafter: the one tried on the quant, if any."""

    scheme: str
    quant: str
    target: str
    drafter: str | None


@flow(name="quantize", flow_run_name=run_name)
def quantize(
    config: QuantizeFlowConfig,
    run: RunKey | None = None,
    parent_run: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
) -> QuantizeOutcome:
    """Quantize a target and re-validate the copy: fidelity, questions, and acceptance of the target's drafter.

    target, drafter: labels such as `smol/2` and `smol-drafter/1`; without them the target that `config` means and its
    newest drafter. run, parent_run: the run that this is a phase of, and its MLflow run.
    """
    name, lineage = config.target.name, Lineage()
    with (
        claim("quantize", config, run, target=target, drafter=drafter) as key,
        lineage.run(key, "quantize", parent_run, model=name) as mlflow_run,
    ):
        chosen = choose(config.target, target, drafter, key)
        made = quantize_weights(chosen.target.artifact, config.quantize, config.engine.dtype)
        quant = lineage.register_quant(
            name,
            made.artifact,
            target=chosen.target,
            run_id=mlflow_run.id,
            config=config,
            tags={"lockstep.scheme": config.quantize.scheme},
        )

        prompts = traffic(config, chosen.target.artifact).held_out_ids()
        base = look_at_base(chosen.target, chosen.drafter, prompts, config, key)
        copy = look_at_quant(quant, prompts, base.artifact, config, key)
        tried = try_drafter(quant, chosen.drafter, prompts, config, key) if chosen.drafter else None

        evidence = write_evidence(
            chosen.target, quant, base.artifact, copy.artifact, tried and tried.measurement, prompts, config
        )
        quant = lineage.attach_evidence(quant, evidence)
        announce(lineage, MEASURED["quant"], quant, by="quantize" if run is None else "loop")
        outcome = QuantizeOutcome(
            run=key,
            mlflow_run_id=mlflow_run.id,
            spans=total(made.spans, base.spans, copy.spans, tried.spans if tried else {}),
            evidence=evidence,
            scheme=config.quantize.scheme,
            quant=quant.label,
            target=chosen.target.label,
            drafter=chosen.drafter and chosen.drafter.label,
        )
        table = read_evidence(evidence)
        mlflow_run.log_metrics(metrics(table))
        mlflow_run.set_tags({"target_version": outcome.target, "quant_version": outcome.quant})
        title = f"{outcome.quant}: {outcome.scheme} of {outcome.target}"
        create_table_artifact(key="quant", table=records(table), description=title)
        create_markdown_artifact(key="quantize", markdown=markdown(title, table), description=title)
        report(title)
        if run is None:
            keep_outcome(key, outcome)
        return outcome
