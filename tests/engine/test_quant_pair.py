"""A drafter on a quant: its rounding is no fault of the drafter's, accepting what the quant does not say is."""

import numpy as np
import pytest

from infra.config.gates import DEFAULT_GATES
from infra.config.quant import QuantizeConfig
from infra.engine.spec import EngineSpec, Role, Speculation
from tasks.evaluate import evidence
from tasks.evaluate.acceptance import measure
from tasks.evaluate.identity import identity_rows, read_again
from tasks.quant.data_free import quantize
from tasks.release.decision import decide
from tasks.release.gates import judge

NEW, SUBJECT = 40, "quant:t/1"
GATE = [gate for gate in DEFAULT_GATES if gate.figure == "quant_output_identity_difference"]


@pytest.fixture(scope="module")
def quant(tiny_qwen3, tmp_path_factory):
    """Of random weights, which find many tokens about as likely: rounding decides often."""
    folder = tmp_path_factory.mktemp("quant")
    quantize(tiny_qwen3, QuantizeConfig(scheme="W8A8"), folder)
    return folder


@pytest.fixture(scope="module")
def prompts():
    """Random tokens with repetitions, so that n-grams propose."""
    generator = np.random.default_rng(4)
    words = generator.integers(1000, 40_000, size=(24, 3))
    return {"chat": [words[generator.integers(24, size=20)].ravel().tolist() for _ in range(48)]}


def test_rounding_passes_and_lossy_speculation_costs_the_drafter_on_the_quant(
    quant, prompts, engine, tiny_engine_config, run
):
    lossy = tiny_engine_config.model_copy(
        update={"extra_flags": ["--worker-extension-cls=tests.lossy_speculation.Generous"]}
    )
    ngram, outputs, told = Speculation(method="ngram", num_speculative_tokens=3), {}, {}
    for name, config, speculation in (
        ("plain", tiny_engine_config, None),
        ("exact", tiny_engine_config, ngram),
        ("lossy", lossy, ngram),
    ):
        spec = EngineSpec(model=quant, role=Role.eval, config=config, speculation=speculation)
        handle = engine(spec).handle()
        measured = run(measure(handle, prompts, subject=SUBJECT, max_new_tokens=NEW, concurrency=8))
        outputs[name] = measured.outputs
        if name == "plain":
            again = run(read_again(handle, prompts, measured.outputs, concurrency=8))
            continue
        rows = identity_rows(outputs["plain"], outputs[name], again=again, subject=SUBJECT, prefix="quant_")
        table = evidence.table(rows, engine="e", hardware="h", command="c")
        verdicts = judge(table, GATE, {"pair": SUBJECT})
        told[name] = (verdicts[0], decide(verdicts, drafter=True, quant=True))
        print(name, verdicts[0].reason, [(r["figure"], r["domain"], r["value"]) for r in rows])
    verdict, decision = told["exact"]
    assert (verdict.verdict, decision.drafter, decision.quant) == ("pass", True, True), verdict.reason
    verdict, decision = told["lossy"]
    assert (verdict.verdict, decision.drafter, decision.quant) == ("fail", False, True), verdict.reason
    assert decision.reasons == [f"released without the drafter on the quant: {verdict.reason}"]
