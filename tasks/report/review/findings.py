"""What the review says: an answer to each question, with its figures and where they come from."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["pass", "fail", "unknown"]


class Fact(BaseModel):
    """A figure: its value as people read it, and where it comes from (MLflow run, artifact, Prefect run)."""

    model_config = ConfigDict(frozen=True)

    name: str
    value: str
    source: str


class Finding(BaseModel):
    """The answer to one question.

    because: why, in one line. change: what would change the verdict.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    question: str
    verdict: Verdict
    because: str
    facts: list[Fact]
    change: str


class Review(BaseModel):
    """All answers about one release. reviewed: UTC, ISO 8601. serves: labels of its parts."""

    model_config = ConfigDict(frozen=True)

    release: str
    serves: list[str]
    reviewed: str
    findings: list[Finding]

    @property
    def count(self) -> dict[str, int]:
        """Findings by verdict."""
        return {v: sum(f.verdict == v for f in self.findings) for v in ("pass", "fail", "unknown")}
