"""What a served release answered."""

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """One question and what the engine answered; tokens: length of the answer."""

    model_config = ConfigDict(frozen=True)

    question: str
    answer: str
    tokens: int
    finish_reason: str


class Served(BaseModel):
    """Answers of the released combination.

    accepted, drafts: counters of its speculation, 0 without. spans: seconds by kind, as in `infra.services.spans`.
    """

    answers: list[Answer]
    accepted: int
    drafts: int
    spans: dict[str, float]
