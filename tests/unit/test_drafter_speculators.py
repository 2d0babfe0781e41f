"""speculators' own trainer learns from what is learned from here."""

import pytest
import torch
from captured_states import add

from infra.config.drafter import DrafterConfig
from tasks.drafter import contract, measure_training, speculators_trainer
from tasks.drafter.measure_training import HERE, THEIRS, THEIRS_FROM_HERE
from tasks.drafter.states import Captured, Sequence
from tasks.drafter.states_writer import StatesWriter
from tasks.drafter.train import HeadTrainer

LAYERS, HIDDEN = [2, 4, 5, 8], 128
CONFIG = DrafterConfig(draft_vocab_size=64, micro_batch_tokens=64, held_out_share=0.25, lr=2e-3)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Conversations of two answers with random states, one of them longer than a pack."""
    folder = tmp_path_factory.mktemp("states")
    generator = torch.Generator().manual_seed(0)
    with StatesWriter(folder, LAYERS) as writer:
        for i in range(8):
            tokens = torch.randint(0, 40, (20 + 10 * i,), generator=generator).tolist()
            answers = [(5, 9), (12, len(tokens))]
            sequence = Sequence(key=str(i), domain="d", token_ids=tokens, answers=answers, finish_reason="length")
            add(writer, Captured(sequence, torch.randn(len(tokens) - 1, len(LAYERS), HIDDEN, generator=generator)))
    return folder


def test_speculators_is_given_the_rows_that_are_trained_on_here(states, tiny_llama, tmp_path):
    trainer = HeadTrainer(tiny_llama, states, CONFIG)
    packs = [next(trainer.packs) for _ in range(4)]
    speculators_trainer.write(trainer.train, tmp_path)
    loader = speculators_trainer._loader(trainer.model, tmp_path, packs, CONFIG, workers=0)
    for chosen, theirs in zip(packs, loader, strict=True):
        ours = trainer.batch(chosen)
        for name, mine in (("hidden_states", "hidden"), ("verifier_last_hidden_states", "target")):
            assert torch.equal(theirs[name][0, : len(ours)], getattr(ours, mine))
        for name in ("input_ids", "loss_mask", "document_ids"):
            assert torch.equal(theirs[name][0, : len(ours)], getattr(ours, name)), name
        assert not theirs["loss_mask"][0, len(ours) :].any()


def test_both_trainers_are_compared_on_the_same_tokens(states, tiny_llama, tmp_path):
    training = measure_training.compare(tiny_llama, states, CONFIG, 4, tmp_path, lambda line: None)
    assert set(training.by) == {HERE, THEIRS, THEIRS_FROM_HERE}
    assert len({one.tokens for one in training.by.values()}) == 1
    assert all(one.tokens_per_second > 0 and one.acceptance >= 1 for one in training.by.values())
    trainer = HeadTrainer(tiny_llama, states, CONFIG)
    packs = [next(trainer.packs) for _ in range(4)]
    rows = [trainer.batch(pack) for pack in packs]
    assert training.by[HERE].tokens == sum(map(len, rows))
    assert training.trained_share == pytest.approx(sum(int(r.loss_mask.sum()) for r in rows) / sum(map(len, rows)))
    speed, length = measure_training.findings(training)
    assert "times speculators' own trainer" in speed and f"After {training.by[HERE].tokens} tokens" in length
    figures = {(row["figure"], row["domain"]) for row in measure_training.rows(training, "target:t")}
    for one in training.by.values():
        contract.check(one.head, tiny_llama)
    assert ("held_out_acceptance", THEIRS) in figures and ("training_tokens_per_second", HERE) in figures


def test_speculators_trains_the_head_it_is_given(states, tiny_llama, tmp_path):
    """From the same start its first step goes the way that a step goes here."""
    config = CONFIG.model_copy(update={"training_steps": 1, "warmup_share": 0.0})
    here, theirs = (HeadTrainer(tiny_llama, states, config) for _ in range(2))
    pack = next(here.packs)
    before = {name: p.detach().clone() for name, p in here.parameters.items()}
    here.step(pack, config.lr)
    speculators_trainer.train(theirs.model, theirs.train, [pack], config, tmp_path)
    for name, start in before.items():
        moved, beside = here.parameters[name] - start, theirs.parameters[name] - start
        assert torch.cosine_similarity(moved.flatten(), beside.flatten(), dim=0) > 0.9, name
