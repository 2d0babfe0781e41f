"""How a model looks from outside: its answers, their speed, what it thinks of texts, and how it does on questions."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from infra.config.flows import QuantizeFlowConfig
from infra.engine.spec import EngineHandle
from infra.services.progress import report
from tasks.evaluate import acceptance, fidelity, identity, problems, questions
from tasks.evaluate.acceptance import Measurement, conditions, measure
from tasks.evaluate.fidelity import Scored, Text
from tasks.evaluate.problems import Problem
from tasks.evaluate.questions import Answer
from tasks.evaluate.under_load import measure_under_load

FILE = "view.json"
Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids by domain


class View(BaseModel):
    """speed: of answering the prompts; load: of a quant, the same at each of `drafter.load_concurrency`; again: of a
    quant, by domain, what it says at each place of those answers when it reads them (`tasks.evaluate.identity`);
    scored: by domain, the model's view of the base's answers to the first of the prompts; answers: to the questions;
    written: answers to the held-out problems."""

    speed: Measurement
    load: list[Measurement] = []
    again: dict[str, list[list[int]]] | None = None
    scored: dict[str, list[Scored]]
    answers: list[Answer]
    written: list[str] = []

    def write(self, folder: Path) -> None:
        """Write the view into `folder`."""
        (folder / FILE).write_text(self.model_dump_json())

    @classmethod
    def read(cls, folder: Path) -> "View":
        """Read the view that `write` wrote."""
        return cls.model_validate_json((folder / FILE).read_bytes())


def texts(prompts: Prompts, base: Measurement, count: int) -> dict[str, list[Text]]:
    """The first `count` prompts of each domain with the base's answers; an empty answer is left out."""
    return {
        domain: [
            Text(token_ids=[*prompt, *answer], answer_start=len(prompt))
            for prompt, answer in zip(some[:count], base.outputs[domain], strict=False)
            if answer
        ]
        for domain, some in prompts.items()
    }


class Known(BaseModel):
    """What other phases measured of the same model: how it answered the prompts, and its answers to questions."""

    speed: Measurement | None = None
    answers: list[Answer] = []


def known(folders: Iterable[Path], prompts: Prompts, config: QuantizeFlowConfig) -> Known:
    """What of this view the evidence in `folders` already holds."""
    folders = list(folders)
    wanted = conditions(prompts, **_as_served(config))
    return Known(
        speed=next((m for m in (acceptance.kept(f, wanted) for f in folders) if m), None),
        answers=[answer for f in folders for answer in questions.kept(f, config.engine.dtype)],
    )


def look(
    handle: EngineHandle,
    model: Path,
    prompts: Prompts,
    held_out: Sequence[Problem],
    base: Measurement | None,
    config: QuantizeFlowConfig,
    subject: str,
    known: Known,
) -> View:
    """The view of the engine behind `handle`, which serves the folder `model` without speculation.

    prompts: token ids by domain. held_out: of the RL environments, answered too. base: how the base answered the
    prompts; None when this is the base. known: not asked again.
    """
    return asyncio.run(_look(handle, model, prompts, held_out, base, config, subject, known))


async def _look(handle, model, prompts, held_out, base, config, subject, known) -> View:
    quant = config.quantize
    limits = dict(concurrency=config.engine.max_concurrent_sequences)
    if not (speed := known.speed):
        report(f"{subject} answers {sum(map(len, prompts.values()))} prompts")
        speed = await measure(handle, prompts, subject=subject, prefix="quant_", suffix="_plain", **_as_served(config))
    load, again = [], None
    if base:
        load = await _under_load(handle, prompts, config, subject, "_plain")
        again = await identity.read_again(handle, prompts, speed.outputs, **limits)
    compared = texts(prompts, base or speed, quant.fidelity_prompts)
    report(f"{subject} scores the base's answers")
    scored = await fidelity.score(handle, compared, top_k=quant.fidelity_top_k, **limits)
    asked = questions.load(quant.tasks, quant.task_questions, quant.seed)
    report(f"{subject} is asked {len(asked)} questions")
    answers = await questions.ask(
        handle, asked, model, max_new_tokens=quant.max_new_tokens, known=known.answers, **limits
    )
    report(f"{subject} is asked {len(held_out)} held-out problems")
    written = await problems.answer(handle, held_out, model, **limits)
    return View(speed=speed, load=load, again=again, scored=scored, answers=answers, written=written)


def speculate(
    handle: EngineHandle, prompts: Prompts, config: QuantizeFlowConfig, subject: str
) -> tuple[Measurement, list[Measurement]]:
    """Acceptance and speed of the engine behind `handle`, which serves a quant with its target's drafter; and the same
    at each of `drafter.load_concurrency`."""

    async def both() -> tuple[Measurement, list[Measurement]]:
        measured = await measure(handle, prompts, subject=subject, prefix="quant_", **_as_served(config))
        return measured, await _under_load(handle, prompts, config, subject, "")

    return asyncio.run(both())


async def _under_load(handle, prompts, config, subject, suffix) -> list[Measurement]:
    conditions = _as_served(config) | {"concurrency": config.drafter.load_concurrency}
    return await measure_under_load(handle, prompts, subject=subject, prefix="quant_", suffix=suffix, **conditions)


def _as_served(config: QuantizeFlowConfig) -> dict:
    """The conditions under which the drafter's acceptance was measured on the target."""
    return dict(
        max_new_tokens=config.drafter.max_new_tokens,
        concurrency=config.drafter.eval_concurrency,
        seed=config.drafter.seed,
        engine=config.engine,
    )
