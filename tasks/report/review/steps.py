"""The step of a review. It is never kept: what is known may have changed since."""

from datetime import UTC, datetime
from pathlib import Path

from infra.config.flows import ReviewFlowConfig
from infra.lineage.lineage import Lineage
from infra.lineage.runs import page
from infra.store.open import open_store
from tasks.report.review.findings import Review
from tasks.report.review.known import gather
from tasks.report.review.page import write
from tasks.report.review.questions import answer


def review_release(config: ReviewFlowConfig, folder: Path) -> Review:
    """Answer the questions about the release that `config.review` means, and write page, Markdown and JSON to `folder`.

    Raises LineageError when there is no such release.
    """
    lineage = Lineage()
    known = gather(lineage, open_store(), config.target.name, config.review)
    release = known.versions["release"]
    review = Review(
        release=release.label,
        serves=list(release.parts.values()),
        reviewed=datetime.now(UTC).isoformat(timespec="seconds"),
        findings=answer(known, config.review),
    )
    write(folder, review, page(lineage.uri, lineage.experiment, ""))
    return review
