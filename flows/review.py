"""Review: the questions of a design review, answered from the evidence of one release."""

from prefect import flow

from flows.outcome import run_name
from flows.pages import show_link, show_markdown, show_table
from infra.config.flows import ReviewFlowConfig
from infra.lineage.lineage import Lineage
from infra.services.progress import report
from infra.services.runs import RunKey, claim, keep_outcome
from infra.services.runs import read as read_run
from tasks.report.review.findings import Review
from tasks.report.review.page import headline
from tasks.report.review.steps import review_release


@flow(name="review", flow_run_name=run_name)
def review(config: ReviewFlowConfig, run: RunKey | None = None) -> Review:
    """Answer each question with pass, fail or unknown, its figures, and what would change the verdict."""
    name = config.target.name
    with claim("review", config, run) as key, Lineage().run(key, "review", model=name) as mlflow_run:
        report(f"reviewing {name} {config.review.release}")
        folder = read_run(key).folder / "review"
        found = review_release(config, folder)

        mlflow_run.log_file(folder, "review")
        mlflow_run.log_metrics({f"review_{verdict}": count for verdict, count in found.count.items()})
        mlflow_run.set_tags({"release_version": found.release} | {f"review.{f.key}": f.verdict for f in found.findings})
        rows = [{"verdict": f.verdict, "about": f.key, "because": f.because} for f in found.findings]  # as wide as fits
        show_table("review-answers", headline(found), rows)
        show_markdown("review", headline(found), (folder / "review.md").read_text())
        if mlflow_run.url:
            show_link("review-page", headline(found), f"{mlflow_run.url}/artifacts/review/index.html", "Review")
        report(headline(found))
        keep_outcome(key, found)
        return found
