"""Serve what is released and ask it questions, as its users will."""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal

import aiohttp

from infra.cluster.session import session
from infra.config.recording import RecordingConfig
from infra.config.target import EngineConfig
from infra.engine.answers import SpeculationCounters
from infra.engine.client import EngineClient
from infra.engine.drafters import speculation
from infra.engine.spec import EngineHandle, EngineSpec, Role, Speculation
from infra.lineage.versions import Version
from infra.services.progress import report
from infra.services.spans import Spans
from infra.store.base import Store
from tasks.evaluate import evidence
from tasks.evaluate.best_k import proposals, schedule
from tasks.release.answers import Answer, Served
from tasks.release.candidate import TABLE, Candidate

RL_PATHS = ("/pause", "/resume", "/sleep", "/collective_rpc", "/init_weight_transfer_engine", "/update_weights")


class ServeError(RuntimeError):
    """The released combination does not serve as it must."""


def spec_of(
    store: Store,
    parts: Candidate,
    engine: EngineConfig,
    num_speculative_tokens: int | Literal["best"],
    recording: RecordingConfig | None = None,
) -> EngineSpec:
    """The engine that serves the target of `parts`, or its quantized copy, with their drafter, and nothing but what
    lineage names. recording: what it keeps of its requests, by default nothing."""
    model = parts.quant or parts.target
    loaded = [model.artifact, *([parts.drafter.artifact] if parts.drafter else [])]
    return EngineSpec(
        model=store.open(model.artifact),
        role=Role.serve,
        config=engine,
        speculation=parts.drafter and _speculation(store, parts.drafter, num_speculative_tokens),
        recording=recording or RecordingConfig(),
        pinned={str(store.open(artifact)): artifact.digest for artifact in loaded},
    )


def _speculation(store: Store, drafter: Version, num_speculative_tokens: int | Literal["best"]) -> Speculation | None:
    folder = store.open(drafter.artifact)
    if num_speculative_tokens != "best":
        return speculation(folder, num_speculative_tokens)
    tables = [evidence.read(store.open(ref) / TABLE) for ref in drafter.evidence]
    found = proposals(evidence.concat(tables), drafter.subject) if tables else []
    if not found:
        raise ServeError(
            f"release.num_speculative_tokens=best: {drafter.label} was never measured beside plain decoding; "
            f"`lockstep drafter` does, or set a number"
        )
    most = max(proposal.num_tokens for proposal in found)
    return speculation(folder, most).model_copy(update={"schedule": schedule(found)}) if most else None


def serve_and_ask(spec: EngineSpec, questions: list[str], max_new_tokens: int) -> Served:
    """Start the engine of `spec`, ask it `questions` greedily over HTTP, and stop it.

    Raises EngineError when it does not start, ServeError when it leaves a question without an answer or has an RL
    endpoint.
    """
    spans = Spans()
    with ExitStack() as stack:
        with spans.measure("engine_start"):
            handle = stack.enter_context(session().engine(spec, progress=report))
        with spans.measure("engine"):
            answers, counters = asyncio.run(_ask_and_count(handle, questions, max_new_tokens))
    return Served(answers=answers, accepted=counters.accepted_tokens, drafts=counters.drafts, spans=dict(spans.seconds))


async def ask(
    handle: EngineHandle, questions: list[str], max_new_tokens: int, headers: Mapping[str, str] | None = None
) -> list[Answer]:
    """Answers to `questions`. headers: sent with each. Raises ServeError as `serve_and_ask` does."""
    open_paths = await exposed(handle)
    if open_paths:
        raise ServeError(
            f"the engine that serves the release answers on {', '.join(open_paths)}: it must not be released"
        )
    answers = []
    async with EngineClient(handle, headers=headers) as client:
        for i, question in enumerate(questions):
            report("asking the released engine", i, len(questions))
            got = await client.chat([{"role": "user", "content": question}], max_tokens=max_new_tokens, temperature=0.0)
            if not got.token_ids:
                raise ServeError(f"the released engine answered {question!r} with nothing: it must not be released")
            answers.append(
                Answer(question=question, answer=got.text, tokens=len(got.token_ids), finish_reason=got.finish_reason)
            )
    return answers


async def _ask_and_count(
    handle: EngineHandle, questions: list[str], max_new_tokens: int
) -> tuple[list[Answer], SpeculationCounters]:
    answers = await ask(handle, questions, max_new_tokens)
    async with EngineClient(handle) as client:
        return answers, await client.speculation()


async def exposed(handle: EngineHandle) -> list[str]:
    """The RL endpoints that a holder of the engine's key reaches: none on an engine of role serve."""
    headers = {"Authorization": f"Bearer {handle.key}"}
    found = []
    async with aiohttp.ClientSession(handle.url, headers=headers) as http:
        for path in RL_PATHS:
            async with http.post(path, json={}) as answer:
                if answer.status != 404:
                    found.append(path)
    return found
