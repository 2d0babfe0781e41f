"""What an RL run leaves behind."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.evaluate.questions import Answer

STEPS, ROLLOUTS, TIMELINE = "steps.parquet", "rollouts.jsonl", "timeline.parquet"


class HeldOut(BaseModel):
    """Rewards at temperature 0 on the same held-out problems of one environment, before and after training.

    A problem whose scorer failed has reward 0. dataset_digest: of the questions.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    before: list[float]
    after: list[float]
    dataset_digest: str


class RLResult(BaseModel):
    """model: folder of the trained target. tables: folder with `steps.parquet` (one row a step), `rollouts.jsonl` and
    `timeline.parquet` (what each worker did when; see `tasks/rl/timeline.py`).
    general_before, general_after: answers to the same general questions, of `general_digest`. spans: seconds by kind of
    work. placement: of trainer and engines (`infra/cluster/placement.py`). resumes: where the run went on under other
    pins, and which. engine, hardware: where it was measured."""

    model_config = ConfigDict(frozen=True)

    model: Path
    tables: Path
    held_out: list[HeldOut]
    general_before: list[Answer]
    general_after: list[Answer]
    general_digest: str
    spans: dict[str, float]
    placement: str
    resumes: list[str] = []
    engine: str
    hardware: str
