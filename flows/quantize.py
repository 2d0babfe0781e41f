"""Quantize: make a quantized copy of a target, and measure in the engine what that costs and gains."""

from prefect import flow

from flows.outcome import Outcome, run_name
from flows.pages import show_page, show_table
from flows.traffic import calibration, held_out_problems, traffic
from infra.cluster.session import session
from infra.config.flows import DrafterFlowConfig, QuantizeFlowConfig
from infra.lineage.announce import MEASURED, announce
from infra.lineage.lineage import Lineage, Version
from infra.services.progress import report
from infra.services.runs import RunKey, claim, keep_outcome
from infra.store.refs import ArtifactRef
from tasks.drafter.kinds import kind
from tasks.drafter.steps import KIND_TAG, Measured, answer_prompts, measure_drafter
from tasks.drafter.traffic import Traffic
from tasks.evaluate.evidence import metrics
from tasks.quant.steps import (
    answered,
    choose,
    look_at_base,
    look_at_quant,
    quantize_weights,
    read_evidence,
    try_drafter,
    write_evidence,
)
from tasks.quant.text import markdown, records, total
from tasks.rl.examining import score


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
        session().warm_up()  # meanwhile the copy is made
        quant, making = (lineage.get(config.quantize.adopted) if config.quantize.adopted else None), {}
        chosen = choose(config.target, quant.parts["target"] if quant else target, drafter, key)
        if quant is None:
            texts = calibration(config, chosen.target.artifact)
            made = quantize_weights(chosen.target.artifact, config.quantize, texts, config.engine.dtype)
            making = made.spans
            quant = lineage.register_quant(
                name,
                made.artifact,
                target=chosen.target,
                run_id=mlflow_run.id,
                config=config,
                tags={"lockstep.scheme": config.quantize.scheme, "lockstep.recipe": config.quantize.recipe},
            )

        asked = traffic(config, chosen.target.artifact)
        prompts = asked.held_out_ids()
        held_out = held_out_problems(config, chosen.target.artifact)
        base = look_at_base(chosen.target, chosen.drafter, prompts, held_out, config, key)
        copy = look_at_quant(quant, prompts, held_out, base.artifact, config, key)
        rewarded = (score(held_out, base.written, config.rl, key), score(held_out, copy.written, config.rl, key))
        tried = try_drafter(quant, chosen.drafter, prompts, config, key) if chosen.drafter else None

        retrained = None
        if config.quantize.retrain_drafter and chosen.drafter:
            retrained = retrain_on_quant(quant, chosen.drafter, asked, copy.artifact, config, key)

        measured = [measured.measurement for measured in (tried, retrained) if measured]
        evidence = write_evidence(
            chosen.target,
            quant,
            base.artifact,
            copy.artifact,
            chosen.drafter,
            measured,
            tried.load if tried else [],
            rewarded,
            prompts,
            config,
        )
        quant = lineage.attach_evidence(quant, evidence)
        if chosen.target.unproven:
            lineage.attach_evidence(chosen.target, evidence)
        announce(lineage, MEASURED["quant"], quant, by="quantize" if run is None else "loop")
        outcome = QuantizeOutcome(
            run=key,
            mlflow_run_id=mlflow_run.id,
            spans=total(
                making, base.spans, copy.spans, *(measured.spans for measured in (tried, retrained) if measured)
            ),
            evidence=evidence,
            scheme=quant.tags["lockstep.scheme"],
            quant=quant.label,
            target=chosen.target.label,
            drafter=chosen.drafter and chosen.drafter.label,
        )
        table = read_evidence(evidence)
        mlflow_run.log_metrics(metrics(table))
        mlflow_run.set_tags({"target_version": outcome.target, "quant_version": outcome.quant})
        title = f"{outcome.quant}: {outcome.scheme} of {outcome.target}"
        show_table("quant", title, records(table))
        show_page("quantize", title, markdown(title, table), mlflow_run)
        report(title)
        if run is None:
            keep_outcome(key, outcome)
        return outcome


def retrain_on_quant(
    quant: Version, drafter: Version, asked: Traffic, view: ArtifactRef, config: QuantizeFlowConfig, key: RunKey
) -> Measured:
    """The drafter once it has learned from the quant itself: its answers, its states, and what it accepts then.

    asked: what the target's drafter learned on and was measured on, so that nothing else differs. view: the quant's.
    """
    settings = config.drafter.model_copy(update={"overfit_check": False})  # its head was checked when it was made
    drafting = config.narrow(DrafterFlowConfig).model_copy(update={"drafter": settings})
    answers = answer_prompts(quant, asked, drafting, key, plain=answered(view))
    made = kind(drafter.tags.get(KIND_TAG, settings.kind)).make(quant, drafter, answers, drafting, key)
    expected = None  # a quant's rounding turns near-ties: it need not give the answers again that were captured
    served = measure_drafter(quant, made.drafter, quant.subject, asked, expected, drafting, suffix="_retrained")
    return served.model_copy(update={"spans": total(answers.spans, made.spans, served.spans)})
