"""General questions with verifiable answers, asked of an engine at temperature 0 and compared question by question."""

import asyncio
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.engine.client import EngineClient
from infra.engine.pin import engine_pin
from infra.engine.spec import EngineHandle
from tasks.evaluate.benchmarks import benchmark
from tasks.evaluate.benchmarks.base import Question
from tasks.evaluate.evidence import row
from tasks.evaluate.paired import mcnemar, paired_rows

KEPT = "answers.json"


class Answer(BaseModel):
    """What the model answered to a question (by id), and its score in [0, 1].

    asked: digest of the question's content, the longest answer allowed and the engine that was asked.
    """

    model_config = ConfigDict(frozen=True)

    question: str
    task: str
    text: str
    score: float
    asked: str


def load(names: Sequence[str], count: int, seed: int) -> list[Question]:
    """A seeded choice of `count` questions of each benchmark in `names`; all of one that has fewer. A larger choice of
    the same seed contains a smaller one.

    Raises BenchmarkError for an unknown benchmark.
    """
    chosen = []
    for name in names:
        questions = benchmark(name).questions()
        random.Random(f"{seed}/{name}").shuffle(questions)
        chosen += questions[:count]
    return chosen


def digest(questions: Sequence[Question]) -> str:
    """`sha256:` of the questions in their order: the dataset digest of what is measured on them."""
    return _digest([q.model_dump(mode="json") for q in questions])


async def ask(
    handle: EngineHandle,
    questions: Sequence[Question],
    tokenizer: Path,
    *,
    max_new_tokens: int,
    concurrency: int,
    known: Sequence[Answer] = (),
) -> list[Answer]:
    """Answers of the engine behind `handle` to `questions`, in their order, at temperature 0.

    tokenizer: the model's folder; questions answered in words go through its chat template, ranked choices do not.
    max_new_tokens: longest answer in words. concurrency: requests in flight.
    known: answers that the same model gave before; what was asked alike is not asked again.
    """
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    slots = asyncio.Semaphore(concurrency)
    given = {answer.asked: answer for answer in known}

    async def answer(client: EngineClient, question: Question) -> Answer:
        limit = None if question.choices else max_new_tokens
        asked = _digest([question.model_dump(mode="json"), limit, engine_pin()])
        if asked in given:
            return given[asked]
        if question.choices:
            text = await _likeliest(client, slots, words, question)
        else:
            chat = [{"role": "user", "content": question.prompt}]
            prompt = words.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            async with slots:
                done = await client.generate(prompt, max_new_tokens=max_new_tokens, temperature=0.0, logprobs=False)
            text = words.decode(done.token_ids, skip_special_tokens=True)
        score = await asyncio.to_thread(benchmark(question.task).judge, question, text)
        return Answer(question=question.id, task=question.task, text=text, score=score, asked=asked)

    async with EngineClient(handle) as client:
        return await asyncio.gather(*(answer(client, q) for q in questions))


def keep(answers: Sequence[Answer], folder: Path, dtype: str) -> None:
    """Write `answers` of a model that ran in `dtype` into `folder`, its evidence, for `kept`."""
    (folder / KEPT).write_text(json.dumps({"dtype": dtype, "answers": [answer.model_dump() for answer in answers]}))


def kept(folder: Path, dtype: str) -> list[Answer]:
    """The answers in `dtype` that `keep` wrote into `folder`; none when it did not."""
    file = folder / KEPT
    found = json.loads(file.read_text()) if file.exists() else {"dtype": dtype, "answers": []}
    return [Answer(**answer) for answer in found["answers"]] if found["dtype"] == dtype else []


def accuracy_comparison(
    before: Sequence[Answer],
    after: Sequence[Answer],
    *,
    figures: tuple[str, str, str] = ("task_accuracy_before", "task_accuracy_after", "task_difference"),
    unit: str = "share of questions",
    subject: str,
    seed: int = 0,
    dataset_digest: str = "",
) -> list[dict]:
    """Evidence rows of mean scores before and after and of their paired difference (named by `figures`, in `unit`), of
    the questions whose answer turned right or wrong, from half of the score on (`..._flips`, a share), and of McNemar's
    p-value (`..._p_value`); domain: each task, and "all" where there are several.

    Raises ValueError when the answers are not to the same questions.
    """
    if [a.question for a in before] != [a.question for a in after]:
        raise ValueError("the answers compared are to different questions: ask both with the same questions")
    tasks = list(dict.fromkeys(a.task for a in before))
    rows = []
    for domain in [*tasks, "all"] if len(tasks) > 1 else tasks:
        pairs = [(b.score, a.score) for b, a in zip(before, after, strict=True) if domain in (b.task, "all")]
        old, new = ([pair[i] for pair in pairs] for i in (0, 1))
        labels = dict(subject=subject, domain=domain, dataset_digest=dataset_digest)
        rows += paired_rows(figures, old, new, seed=seed, unit=unit, **labels)
        test = mcnemar([score >= 0.5 for score in old], [score >= 0.5 for score in new])
        flips = (test.gained + test.lost) / len(pairs)
        stem = figures[2].removesuffix("_difference")
        rows.append(row(f"{stem}_flips", flips, n=len(pairs), unit="share of questions", **labels))
        rows.append(row(f"{stem}_p_value", test.p_value, n=test.gained + test.lost, unit="probability", **labels))
    return rows


def _digest(value: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


async def _likeliest(client: EngineClient, slots: asyncio.Semaphore, words, question: Question) -> str:
    """The choice with the highest log-probability after the prompt, a space between them."""
    context = words.encode(question.prompt, add_special_tokens=False)

    async def likelihood(choice: str) -> float:
        tokens = words.encode(f"{question.prompt} {choice}", add_special_tokens=False)
        # Where the space joins the last token of the prompt, the choice begins at the first token that differs.
        start = next((i for i, (a, b) in enumerate(zip(context, tokens, strict=False)) if a != b), len(context))
        async with slots:
            scores = await client.score(tokens, top_k=0)
        total = sum(score.logprob for score in scores[start - 1 :])
        return total / len(choice.encode()) if question.per_byte else total

    likelihoods = await asyncio.gather(*(likelihood(choice) for choice in question.choices))
    return question.choices[likelihoods.index(max(likelihoods))]
