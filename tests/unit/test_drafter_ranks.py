"""Two ranks train what one trains, and each goes on from the other's checkpoint."""

import json

import pytest
import torch
from captured_states import add

from infra.cluster.ranks import Ranks
from infra.config.drafter import DrafterConfig
from infra.config.flows import DrafterFlowConfig
from infra.config.target import ClusterConfig
from tasks.drafter import contract
from tasks.drafter.answers import Answered
from tasks.drafter.export import CARD, tokenizer_digest
from tasks.drafter.heads import load_weights
from tasks.drafter.remote import RemoteWorker
from tasks.drafter.sharded import share
from tasks.drafter.states import Captured, Sequence
from tasks.drafter.states_writer import StatesWriter
from tasks.drafter.worker import TrainerWorker

LAYERS, HIDDEN, STEPS = [2, 4, 5, 8], 128, 6
CONFIG = DrafterConfig(
    patience=0,
    training_steps=STEPS,
    checkpoint_every=3,
    draft_vocab_size=64,
    micro_batch_tokens=96,
    held_out_share=0.25,
    lr=2e-3,
)
LATER = 1e-5
"""AdamW divides by the size of a gradient, and so magnifies what rounding does to the smallest."""


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """One sequence fills a pack alone: then the second rank has nothing to do."""
    folder = tmp_path_factory.mktemp("states")
    generator = torch.Generator().manual_seed(0)
    with StatesWriter(folder, LAYERS) as writer:
        for i in range(9):
            tokens = torch.randint(0, 40, (96 if i == 8 else 20 + 4 * i,), generator=generator).tolist()
            sequence = Sequence(
                key=str(i), domain="d", token_ids=tokens, answers=[(8, len(tokens))], finish_reason="length"
            )
            hidden = torch.randn(len(tokens) - 1, len(LAYERS), HIDDEN, generator=generator)
            add(writer, Captured(sequence, hidden))
    return folder


@pytest.fixture(scope="module")
def two():
    return RemoteWorker(DrafterFlowConfig(cluster=ClusterConfig(trainer_ranks=2, trainer_threads=1)))


def test_sequences_are_shared_once_and_evenly():
    lengths = [50, 10, 20, 40, 30]
    parts = [share(lengths, Ranks(rank, 2)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3, 4]
    assert sorted(sum(lengths[i] for i in part) for part in parts) == [70, 80]
    assert share(lengths, Ranks()) == [0, 1, 2, 3, 4] and share([9], Ranks(1, 2)) == []


def assert_curves(found: dict, expected: dict, bound: float) -> None:
    for name in ("loss", "grad_norm", "held_out_acceptance"):
        for step, (one, other) in enumerate(zip(found[name], expected[name], strict=True)):
            assert one == other or one == pytest.approx(other, rel=5e-6 if step < 2 else bound), (name, step)


def test_two_ranks_train_the_head_that_one_trains(two, states, tiny_llama, tmp_path):
    alone = TrainerWorker()
    alone.begin(tiny_llama, states, CONFIG, None)
    alone.resume(tmp_path / "alone.pt")
    alone.advance(3)
    two.do("begin", tiny_llama, states, CONFIG, None)
    assert two.do("resume", tmp_path / "two.pt") == 0
    assert two.do("advance", 3).step == 3
    kept = {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("alone", "two")}
    assert kept["two"]["tokens"] == kept["alone"]["tokens"]
    for name, weight in kept["alone"]["weights"].items():
        torch.testing.assert_close(kept["two"]["weights"][name], weight, atol=LATER, rtol=0)
    # Each goes on from what the other kept.
    resumed = TrainerWorker()
    resumed.begin(tiny_llama, states, CONFIG, None)
    assert resumed.resume(tmp_path / "two.pt") == 3
    two.do("begin", tiny_llama, states, CONFIG, None)
    assert two.do("resume", tmp_path / "alone.pt") == 3
    for worker in (alone, resumed):
        assert worker.advance(STEPS).finished
    assert two.do("advance", STEPS).finished
    expected = alone.result()
    for found in (resumed.result(), two.do("result")):
        assert_curves(found.curve, expected.curve, LATER)
        assert found.tokens == expected.tokens and found.expected == expected.expected
    two.do("export", tmp_path / "head", tokenizer_digest(tiny_llama), "float32")
    alone.export(tmp_path / "expected", tokenizer_digest(tiny_llama), "float32")
    contract.check(tmp_path / "head", tiny_llama)
    weights, wanted = (load_weights(tmp_path / name) for name in ("head", "expected"))
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, atol=10 * LATER, rtol=0)
    cards = [json.loads((tmp_path / n / CARD).read_text()) for n in ("head", "expected")]
    assert cards[0] == cards[1]


def test_two_ranks_learn_an_answer_and_distil_a_model_as_one_does(two, states, tiny_llama):
    config = CONFIG.model_copy(update={"micro_batch_tokens": 64})
    alone = TrainerWorker()
    assert two.do("overfit", tiny_llama, states, config, "3", 10) == alone.overfit(tiny_llama, states, config, "3", 10)
    answers = [
        Answered(key=str(i), domain="d", token_ids=[i + 5] * (12 + i), answers=[(4, 12 + i)], finish_reason="stop")
        for i in range(6)
    ]
    small = CONFIG.model_copy(update={"num_layers": 2, "training_steps": 2})
    alone.begin_draft_model(tiny_llama, answers, small, None)
    alone.advance(2)
    two.do("begin_draft_model", tiny_llama, answers, small, None)
    two.do("advance", 2)
    assert_curves(two.do("result").curve, alone.result().curve, LATER)
