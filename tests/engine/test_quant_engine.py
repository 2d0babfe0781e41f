"""Quantized copies in the engine: a good one stays close to its base, one with damaged scales does not."""

import numpy as np
import pytest

from infra.config.gates import DEFAULT_GATES
from infra.config.quant import QuantizeConfig
from infra.engine.spec import EngineSpec, Role
from tasks.evaluate import evidence, fidelity, questions
from tasks.evaluate.fidelity import Text
from tasks.quant.data_free import quantize
from tasks.release.decision import decide
from tasks.release.gates import judge

TOP_K = 256
KL_GATE = [gate for gate in DEFAULT_GATES if gate.figure == "quant_kl"]


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen3"])
def base(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def confident(base, tmp_path_factory):
    """The base with sharper answers: random weights alone give every token the same chance."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("confident")
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] *= 12
    for name in weights:
        if "_proj" in name:
            weights[name] *= 4
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def texts():
    generator = np.random.default_rng(0)
    tokens = generator.integers(100, 40_000, size=(2, 4, 48)).tolist()
    return {d: [Text(token_ids=t, answer_start=16) for t in some] for d, some in zip(("a", "b"), tokens, strict=True)}


@pytest.fixture(scope="module")
def see(engine, tiny_engine_config, texts):
    import asyncio

    def see(model):
        spec = EngineSpec(model=model, role=Role.eval, config=tiny_engine_config)
        return asyncio.run(fidelity.score(engine(spec).handle(), texts, top_k=TOP_K, concurrency=4))

    return see


def test_w8a8_is_close_and_damaged_scales_are_not(confident, see, tmp_path):
    from safetensors.torch import load_file, save_file

    original = see(confident)
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        quantize(confident, QuantizeConfig(scheme="W8A8"), folder)
    weights = load_file(bad / "model.safetensors")
    damaged = "model.layers.3.mlp.down_proj.weight_scale"
    weights[damaged] = weights[damaged] * 3
    save_file(weights, bad / "model.safetensors", {"format": "pt"})
    kl, verdicts = {}, {}
    for name, folder in (("good", good), ("bad", bad)):
        rows = {(r["figure"], r["domain"]): r for r in fidelity.rows(original, see(folder), subject="quant:t/1")}
        kl[name] = rows["quant_kl", "all"]
        assert kl[name]["n"] == 2 * 4 * 32
        table = evidence.table(list(rows.values()), engine="e", hardware="h", command="test")
        verdicts[name] = judge(table, KL_GATE, {"quant": "quant:t/1"})
        assert kl[name]["low"] <= kl[name]["value"] <= kl[name]["high"]
    assert kl["good"]["high"] < 0.01 < 0.1 < kl["bad"]["low"]
    assert all(v.verdict == "pass" for v in verdicts["good"])
    decision = decide(verdicts["bad"], drafter=False, quant=True)
    assert decision.target and not decision.quant
    assert f"quant KL small: quant_kl on all is {kl['bad']['value']:.4g} [" in "; ".join(decision.reasons)


def test_the_engine_scores_as_the_model_itself_does(confident, see, texts):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(confident, dtype=torch.float32)
    for text, scored in zip(texts["a"], see(confident)["a"], strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([text.token_ids])).logits[0].double().log_softmax(-1)
        answer = range(text.answer_start, len(text.token_ids))
        expected = [float(logprobs[p - 1, text.token_ids[p]]) for p in answer]
        assert scored.logprobs == pytest.approx(expected, abs=1e-3)
        for p, top in zip(answer, scored.top, strict=True):
            assert max(top, key=top.__getitem__) == int(logprobs[p - 1].argmax())
            assert len(top) >= TOP_K


def test_questions_are_asked_and_scored_alike_twice(confident, engine, tiny_engine_config, run, tmp_path):
    handle = engine(EngineSpec(model=confident, role=Role.eval, config=tiny_engine_config)).handle()
    asked = questions.load(["hellaswag", "capitals"], 3, seed=0)
    first, second = (run(questions.ask(handle, asked, confident, max_new_tokens=4, concurrency=3)) for _ in range(2))
    assert first == second and [a.question for a in first] == [q.id for q in asked]
    assert all(a.text in q.choices for a, q in zip(first, asked, strict=True) if q.choices)
    rows = questions.accuracy_comparison(first, second, subject="target:t/2", dataset_digest=questions.digest(asked))
    difference = {r["domain"]: r for r in rows if r["figure"] == "task_difference"}
    assert set(difference) == {"hellaswag", "capitals", "all"} and difference["all"]["n"] == 6
    assert all(r["value"] == r["low"] == r["high"] == 0.0 for r in difference.values())
    with pytest.raises(ValueError, match="different questions"):
        questions.accuracy_comparison(first, second[::-1], subject="target:t/2")

    questions.keep([a.model_copy(update={"score": 0.5}) for a in first[1:]], tmp_path, "float32")
    known = questions.kept(tmp_path, "float32")
    assert questions.kept(tmp_path, "bfloat16") == []
    third = run(questions.ask(handle, asked, confident, max_new_tokens=4, concurrency=3, known=known))
    assert third == [first[0], *known]  # only what was not known was asked
    longer = run(questions.ask(handle, asked[-1:], confident, max_new_tokens=5, concurrency=3, known=known))
    assert longer[0].score != 0.5  # under other conditions
