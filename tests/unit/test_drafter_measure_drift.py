"""How a measurement of drift trains, and what it says about its courses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from captured_states import add

from infra.config.drafter import DrafterConfig
from tasks.drafter import contract
from tasks.drafter.measure_drift import BEFORE, OLD, SCRATCH, WARM, Course, measured, train
from tasks.drafter.states import Captured, Sequence
from tasks.drafter.states_writer import StatesWriter

HERE = Path("head")
UNCHANGED = {"all": (2.0, 100), "maths": (1.6, 40)}


def courses(warm: list[tuple[int, float]]) -> dict[str, Course]:
    scratch = [(0, 1.0), (500, 1.9), (1000, 2.19), (2000, 2.2)]
    served = {"all": (2.1, 90), "maths": (2.5, 30)}
    return {
        OLD: Course(warm[:1], HERE, {"all": (1.8, 100), "maths": (1.5, 40)}),
        WARM: Course(warm, HERE, served),
        SCRATCH: Course(scratch, HERE, served),
    }


def test_a_warm_start_is_compared_with_what_training_from_nothing_took():
    found = measured("t", courses([(0, 1.8), (50, 2.1), (100, 2.196)]), UNCHANGED)
    figures = {(row["figure"], row["domain"]): row["value"] for row in found.rows}
    assert figures["acceptance_lost", ""] == pytest.approx(0.4 / 2.2)
    assert figures["acceptance_recovered", ""] == pytest.approx(0.396 / 0.4)
    assert figures["tokens_of_scratch", ""] == pytest.approx(0.1)
    assert figures["served_acceptance_maths", OLD] == 1.5 and figures["served_acceptance_maths", BEFORE] == 1.6
    served, lost, back = found.findings
    assert "made for, the drafter accepts 2.000 tokens a pass, with the changed one 1.800" in served
    assert "18.2% are lost" in lost
    assert "within 1% of that after 1000 tokens" in lost and "wins back 99% with 100 tokens, 10.0%" in back
    assert "95% of it after 100, 10.0%" in back and figures["tokens_to_recover", ""] == pytest.approx(0.1)
    assert [line["tokens trained on"] for line in found.table] == [0, 0, 100, 2000]
    assert all(line["served, maths"] for line in found.table)


def test_traffic_of_one_domain_has_no_figures_of_all():
    of_one = {name: replace(course, served={"maths": (1.5, 40)}) for name, course in courses([(0, 1.8)]).items()}
    served, *_ = measured("t", of_one, {"maths": (1.6, 40)}).findings
    assert "accepts 1.600 tokens a pass, with the changed one 1.500" in served


def test_what_was_not_lost_is_not_won_back():
    found = measured("t", courses([(0, 2.3), (100, 2.31)]), UNCHANGED)
    assert "acceptance_recovered" not in {row["figure"] for row in found.rows}
    _, lost = found.findings
    assert "training from nothing gave no more" in lost and "lost" not in lost
    (partly,) = measured("t", courses([(0, 1.8), (100, 1.9)]), UNCHANGED).findings[2:]
    assert "wins back 25%" in partly and "of it after" not in partly


def test_both_courses_are_looked_at_by_tokens_and_end_in_heads_that_can_be_served(tiny_llama, tmp_path):
    layers, generator = [2, 4, 5, 8], torch.Generator().manual_seed(0)
    with StatesWriter(tmp_path / "states", layers) as writer:
        for i in range(8):
            tokens = torch.randint(0, 40, (30,), generator=generator).tolist()
            sequence = Sequence(key=str(i), domain="d", token_ids=tokens, answers=[(8, 30)], finish_reason="length")
            add(writer, Captured(sequence, torch.randn(29, len(layers), 128, generator=generator)))
    config = DrafterConfig(
        training_steps=6, held_out_looks=3, patience=0, draft_vocab_size=64, micro_batch_tokens=96, held_out_share=0.25
    )
    scratch = train(tiny_llama, tmp_path / "states", config, None, tmp_path / SCRATCH, "float32")
    few = config.model_copy(update={"training_steps": 3})
    warm = train(tiny_llama, tmp_path / "states", few, scratch.head, tmp_path / WARM, "float32")
    assert [tokens for tokens, _ in scratch.looks][0] == 0 and len(scratch.looks) == 4
    assert scratch.tokens == scratch.looks[-1][0] > warm.tokens > 0
    assert warm.looks[0][1] == scratch.best, "it begins where the other was at its best"
    for course in (scratch, warm):
        contract.check(course.head, tiny_llama)
