"""How a model looks from outside: its answers, their speed, what it thinks of texts, and how it does on questions."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from infra.config.drafter import DrafterConfig
from infra.config.quant import QuantizeConfig
from infra.engine.spec import EngineHandle
from tasks.evaluate import fidelity, questions
from tasks.evaluate.acceptance import Measurement, measure
from tasks.evaluate.fidelity import Scored, Text
from tasks.evaluate.questions import Answer

FILE = "view.json"


class View(BaseModel):
    """speed: of answering the prompts; scored: by domain, the model's view of the base's answers to the first of them;
    answers: to the questions."""

    speed: Measurement
    scored: dict[str, list[Scored]]
    answers: list[Answer]

    def write(self, folder: Path) -> None:
        """Write the view into `folder`."""
        (folder / FILE).write_text(self.model_dump_json())

    @classmethod
    def read(cls, folder: Path) -> "View":
        """Read the view that `write` wrote."""
        return cls.model_validate_json((folder / FILE).read_bytes())


def texts(prompts: Mapping[str, Sequence[Sequence[int]]], base: Measurement, count: int) -> dict[str, list[Text]]:
    """The first `count` prompts of each domain with the base's answers; an empty answer is left out."""
    return {
        domain: [
            Text(token_ids=[*prompt, *answer], answer_start=len(prompt))
            for prompt, answer in zip(some[:count], base.outputs[domain], strict=False)
            if answer
        ]
        for domain, some in prompts.items()
    }


def look(
    handle: EngineHandle,
    model: Path,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    base: Measurement | None,
    config: QuantizeConfig,
    drafter: DrafterConfig,
    subject: str,
) -> View:
    """The view of the engine behind `handle`, which serves the folder `model`, without speculation.

    prompts: token ids by domain. base: how the base answered them; None when this is the base.
    """
    return asyncio.run(_look(handle, model, prompts, base, config, drafter, subject))


async def _look(handle, model, prompts, base, config, drafter, subject) -> View:
    speed = await measure(handle, prompts, subject=subject, **_as_served(drafter), prefix="quant_", suffix="_plain")
    limits = dict(concurrency=drafter.eval_concurrency)
    scored = await fidelity.score(
        handle, texts(prompts, base or speed, config.fidelity_prompts), top_k=config.fidelity_top_k, **limits
    )
    asked = questions.load(config.tasks, config.task_questions, config.seed)
    answers = await questions.ask(handle, asked, model, max_new_tokens=config.max_new_tokens, **limits)
    return View(speed=speed, scored=scored, answers=answers)


def speculate(
    handle: EngineHandle, prompts: Mapping[str, Sequence[Sequence[int]]], drafter: DrafterConfig, subject: str
) -> Measurement:
    """Acceptance and speed of the engine behind `handle`, which serves a quant with its target's drafter."""
    return asyncio.run(measure(handle, prompts, subject=subject, **_as_served(drafter), prefix="quant_"))


def _as_served(drafter: DrafterConfig) -> dict:
    """The conditions under which the drafter's acceptance was measured on the target."""
    return dict(max_new_tokens=drafter.max_new_tokens, concurrency=drafter.eval_concurrency, seed=drafter.seed)
