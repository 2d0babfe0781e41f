"""What the client asks and what comes back, against HF's own numbers."""

import asyncio
import math
import os
import signal

import pytest

from infra.engine.answers import numbered
from infra.engine.client import EngineClient
from infra.engine.errors import EngineError, EngineGone
from infra.engine.launch import start
from infra.engine.spec import EngineHandle, EngineSpec, Role, Speculation

PROMPT = [1, 520, 9531, 198, 17, 4]


@pytest.fixture
def rollout(engine, tiny_llama, tiny_engine_config) -> EngineHandle:
    return engine(EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)).handle()


@pytest.fixture
def serve(engine, tiny_llama, tiny_engine_config) -> EngineHandle:
    return engine(EngineSpec(model=tiny_llama, role=Role.serve, config=tiny_engine_config)).handle()


async def generate(handle: EngineHandle, prompt=PROMPT, **sampling):
    async with EngineClient(handle) as client:
        return await client.generate(prompt, **{"max_new_tokens": 12, "temperature": 1.0, "seed": 5} | sampling)


def hf_logprobs(model, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of token_ids[1:] each given all before, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = (network(torch.tensor([token_ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3"])
def test_tokens_and_their_logprobs(engine, request, tiny_engine_config, run, model):
    folder = request.getfixturevalue(model)
    handle = engine(EngineSpec(model=folder, role=Role.rollout, config=tiny_engine_config)).handle()
    answer = run(generate(handle, ignore_eos=True))
    assert answer.prompt_ids == PROMPT and len(answer.token_ids) == 12 and answer.finish_reason == "length"
    ((weights, *span),) = answer.weight_versions
    assert numbered(weights) == 0 and span == [0, 12]
    assert answer.logprobs == pytest.approx(hf_logprobs(folder, PROMPT + answer.token_ids)[len(PROMPT) - 1 :], abs=1e-4)


def test_rollout_logprobs_are_those_of_the_tempered_distribution(rollout, tiny_llama, run):
    answer = run(generate(rollout, temperature=0.6, ignore_eos=True))
    tempered = hf_logprobs(tiny_llama, PROMPT + answer.token_ids, temperature=0.6)
    assert answer.logprobs == pytest.approx(tempered[len(PROMPT) - 1 :], abs=1e-4)


def test_both_ways_to_generate_agree(rollout, serve, run):
    through_rl, through_openai = run(generate(rollout)), run(generate(serve))
    assert through_rl.token_ids == through_openai.token_ids
    assert through_rl.logprobs == pytest.approx(through_openai.logprobs, abs=1e-5)
    assert through_openai.weight_versions == [] and through_rl.finish_reason == through_openai.finish_reason
    for handle in (rollout, serve):
        without = run(generate(handle, logprobs=False))
        assert (without.token_ids, without.logprobs) == (through_rl.token_ids, [])


def test_a_seed_gives_the_same_tokens_alone_and_among_others(rollout, run):
    async def together():
        return await asyncio.gather(*(generate(rollout, seed=seed) for seed in range(16)))

    crowd = run(together())
    assert [answer.token_ids for answer in crowd[:3]] == [run(generate(rollout, seed=s)).token_ids for s in range(3)]
    assert len({tuple(answer.token_ids) for answer in crowd}) == 16


def test_hundreds_in_flight_over_one_client(rollout, run):
    async def many():
        async with EngineClient(rollout) as client:
            return await asyncio.gather(
                *(client.generate([i + 1], max_new_tokens=4, temperature=1.0, ignore_eos=True) for i in range(600))
            )

    answers = run(many())
    assert [answer.prompt_ids for answer in answers] == [[i + 1] for i in range(600)]
    assert all(len(answer.token_ids) == len(answer.logprobs) == 4 for answer in answers)


def test_stream_yields_the_tokens_of_generate(serve, run):
    async def streamed():
        async with EngineClient(serve) as client:
            chunks = client.stream(PROMPT, max_new_tokens=12, temperature=1.0, seed=5)
            return [token for chunk in [c async for c in chunks] for token in chunk]

    assert run(streamed()) == run(generate(serve)).token_ids


def test_score_is_the_models_own_distribution(rollout, tiny_llama, run):
    async def score():
        async with EngineClient(rollout) as client:
            return await client.score(PROMPT, top_k=300)

    scored = run(score())
    assert [token.token_id for token in scored] == PROMPT[1:]
    assert [token.logprob for token in scored] == pytest.approx(hf_logprobs(tiny_llama, PROMPT), abs=1e-4)
    for token in scored:
        assert 300 <= len(token.top) <= 301 and sum(map(math.exp, token.top.values())) < 1
        assert max(token.top.values()) >= token.logprob


def test_chat_answers_with_its_tokens(serve, run):
    async def chat():
        async with EngineClient(serve) as client:
            return await client.chat([{"role": "user", "content": "hello"}], max_tokens=5, temperature=0)

    answer = run(chat())
    assert answer.text and len(answer.token_ids) == 5 and answer.finish_reason == "length" and answer.prompt_ids


def test_a_paused_engine_keeps_its_requests(rollout, run):
    async def pause_and_resume():
        async with EngineClient(rollout) as client:
            await client.pause("keep")
            assert await client.is_paused()
            waiting = asyncio.create_task(client.generate(PROMPT, max_new_tokens=4, temperature=0))
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
            await client.reset_prefix_cache()
            await client.resume()
            return await waiting

    assert len(run(pause_and_resume()).token_ids) == 4


def test_abort_ends_requests_with_what_they_have(rollout, run):
    async def abort():
        async with EngineClient(rollout) as client:
            await client.pause("keep")
            waiting = asyncio.create_task(client.generate(PROMPT, max_new_tokens=400, temperature=0, ignore_eos=True))
            while not await client.abort():
                await asyncio.sleep(0.01)
            await client.resume()
            return await waiting

    answer = run(abort())
    assert answer.finish_reason == "abort" and len(answer.token_ids) < 400


def test_speculation_is_counted(engine, tiny_llama, tiny_engine_config, rollout, run):
    speculating = EngineSpec(
        model=tiny_llama,
        role=Role.serve,
        config=tiny_engine_config,
        speculation=Speculation(method="ngram", num_speculative_tokens=3),
    )

    async def counted(handle):
        async with EngineClient(handle) as client:
            before = await client.speculation()
            # The greedy output of a random model repeats itself: n-grams foresee it.
            await client.generate(PROMPT, max_new_tokens=60, temperature=0, ignore_eos=True)
            return (await client.speculation()).since(before)

    counters = run(counted(engine(speculating).handle()))
    assert 0 < counters.accepted_tokens <= counters.draft_tokens <= 3 * counters.drafts
    assert sum(counters.accepted_per_position) == counters.accepted_tokens
    assert counters.acceptance_length == pytest.approx(1 + sum(counters.acceptance_rates))
    nothing = run(counted(rollout))
    assert (nothing.drafts, nothing.accepted_per_position) == (0, ()) and math.isnan(nothing.acceptance_length)


def test_a_refused_request_tells_the_engines_reason(rollout, run):
    with pytest.raises(EngineError, match="400: .*max_model_len|400: .*maximum context length"):
        run(generate(rollout, prompt=[1] * 600))
    with pytest.raises(EngineError, match="temperature"):
        run(generate(rollout, temperature=-1.0))


def test_a_wrong_key_is_refused(rollout, run):
    with pytest.raises(EngineError, match="401: the engine's key is missing or wrong"):
        run(generate(rollout.model_copy(update={"key": "wrong"})))


def test_requests_of_a_dead_engine_fail_at_once(tiny_llama, tiny_engine_config, tmp_path, run):
    engine = start(EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config), tmp_path)

    async def kill_meanwhile():
        async with EngineClient(engine.handle()) as client:
            await client.pause("keep")
            waiting = [asyncio.create_task(client.generate(PROMPT, max_new_tokens=4, temperature=0)) for _ in range(3)]
            done, _ = await asyncio.wait(waiting, timeout=0.3)
            assert not done
            os.kill(engine.pid, signal.SIGKILL)
            return await asyncio.gather(*waiting, return_exceptions=True)

    for error in run(kill_meanwhile()):
        assert isinstance(error, EngineGone), error
    engine.stop()
    with pytest.raises(EngineGone, match="it has died or was stopped"):
        run(generate(engine.handle()))
