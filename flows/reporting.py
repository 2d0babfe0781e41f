"""The loop's report: built from what the phases measured, kept, and linked where people look."""

from datetime import UTC, datetime

from prefect.runtime import flow_run

from flows.drafter import DrafterOutcome
from flows.pages import show_link, show_page
from flows.quantize import QuantizeOutcome
from flows.release import ReleaseOutcome
from flows.rl import RLOutcome
from infra.config.flows import LoopConfig
from infra.engine.pin import engine_pin, hardware
from infra.lineage.aliases import aliases
from infra.lineage.lineage import Lineage
from infra.lineage.runs import Run
from infra.services.runs import read as read_run
from infra.store.open import open_store
from tasks.report.build import build
from tasks.report.collect import summarise
from tasks.report.measured import read
from tasks.report.summary import Answer, GateVerdict, LoopSummary, Phase, Released, Versions


def publish(
    config: LoopConfig,
    started: datetime,
    phases: dict[str, Phase],
    policy: RLOutcome,
    head: DrafterOutcome,
    copy: QuantizeOutcome,
    shipped: ReleaseOutcome,
    mlflow_run: Run,
) -> LoopSummary:
    """Write the report into the run's folder, attach it to the MLflow run and link it from Prefect."""
    store = open_store()
    folder = read_run(shipped.run).folder / "report"
    measured = read([store.open(outcome.evidence) for outcome in (policy, head, copy, shipped)])
    summary = summarise(
        run=shipped.run,
        flow="loop",
        verdict="refused" if shipped.refused else "released",
        started=started.isoformat(timespec="seconds"),
        wall_s=(datetime.now(UTC) - started).total_seconds(),
        phases=phases,
        versions=versions(config.target.name, policy, head, copy, shipped),
        engine=engine_pin(),
        hardware=hardware(),
        measured=measured,
        mismatch_bounds=(
            config.rl.mismatch.warns(config.engine.dtype, config.rl.trainer_dtype),
            config.rl.mismatch.stops(),
        ),
        ratio_bound=config.rl.correction_high,
        scheme=copy.scheme,
        verdicts=[GateVerdict.model_validate(v.model_dump()) for v in shipped.verdicts],
        released=Released.model_validate(shipped.decision.model_dump()),
        served=[Answer(question=a.question, answer=a.answer) for a in shipped.served],
        addresses={"prefect": flow_run.ui_url or "", "mlflow": mlflow_run.url},
    )
    page = build(folder, summary, measured)
    mlflow_run.log_file(folder, "report")
    mlflow_run.log_metrics({"wall_s": summary.wall_s, "overhead_s": summary.overhead["seconds"]})
    if mlflow_run.url:
        show_link("report", summary.run, f"{mlflow_run.url}/artifacts/report/index.html", "Report")
    show_page("loop", summary.run, (folder / "summary.md").read_text(), mlflow_run)
    return summary.model_copy(update={"report": str(page)})


def versions(
    name: str, policy: RLOutcome, head: DrafterOutcome, copy: QuantizeOutcome, shipped: ReleaseOutcome
) -> Versions:
    """Numbers and digests of the versions that the run made or judged."""
    labels = {
        "target": policy.target,
        "parent": policy.parent,
        "drafter": head.drafter,
        "quant": copy.quant,
        "release": shipped.release,
    }
    lineage = Lineage()
    found = {kind: lineage.get(label) for kind, label in labels.items() if label}
    return Versions(
        name=name,
        **{kind: version.version for kind, version in found.items()},
        aliases=[alias for alias, label in aliases(lineage, name).items() if label == shipped.release],
        digests={kind: version.artifact.digest for kind, version in found.items()},
    )
