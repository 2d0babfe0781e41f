"""What a run shows, where people look for it: on the run's page in Prefect, and on that of its MLflow run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.runtime import flow_run

from infra.lineage.runs import Run
from infra.services.patience import patiently


def show_page(key: str, title: str, page: str, mlflow_run: Run) -> None:
    """Show `page` (Markdown) in both places, each linked to the other."""
    linked = page.rstrip() + (f"\n\n[This run in MLflow]({mlflow_run.url})\n" if mlflow_run.url else "\n")
    show_markdown(key, title, linked)
    mlflow_run.describe(f"[This run in Prefect]({flow_run.ui_url})\n\n{page}" if flow_run.ui_url else page)


def show_markdown(key: str, title: str, page: str) -> None:
    """Show `page` in Prefect alone."""
    patiently(partial(create_markdown_artifact, key=key, markdown=page, description=title))


def show_table(key: str, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Show `rows` in Prefect, a column for each of their keys."""
    patiently(partial(create_table_artifact, key=key, table=rows, description=title))


def show_link(key: str, title: str, link: str, text: str) -> None:
    """Show `text`, which leads to `link`, in Prefect."""
    patiently(partial(create_link_artifact, key=key, link=link, link_text=text, description=title))
