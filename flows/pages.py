"""A page of results, where people look for it: on the run's page in Prefect, and on that of its MLflow run."""

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from infra.lineage.runs import Run


def show_page(key: str, title: str, page: str, mlflow_run: Run) -> None:
    """Show `page` (Markdown) in both places, each linked to the other."""
    linked = page.rstrip() + (f"\n\n[This run in MLflow]({mlflow_run.url})\n" if mlflow_run.url else "\n")
    create_markdown_artifact(key=key, markdown=linked, description=title)
    mlflow_run.describe(f"[This run in Prefect]({flow_run.ui_url})\n\n{page}" if flow_run.ui_url else page)
