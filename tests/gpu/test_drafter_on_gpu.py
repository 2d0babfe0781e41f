"""What a drafter's trainer computes otherwise on a GPU: fused losses, bfloat16, packs made by another thread."""

import pytest
import torch

from infra.config.drafter import DrafterConfig
from tasks.drafter import contract
from tasks.drafter.export import tokenizer_digest
from tasks.drafter.states import Captured, Sequence, StatesWriter
from tasks.drafter.train import HeadTrainer
from tasks.drafter.worker import TrainerWorker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")

LAYERS, HIDDEN = [2, 4, 5, 8], 128
CONFIG = DrafterConfig(
    patience=0, training_steps=8, draft_vocab_size=4096, micro_batch_tokens=700, held_out_share=0.2, lr=1e-3
)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Random states in bfloat16, of sequences between 30 and 300 tokens: lengths that no kernel's blocks divide."""
    folder = tmp_path_factory.mktemp("states")
    generator = torch.Generator().manual_seed(0)
    with StatesWriter(folder, LAYERS) as writer:
        for i in range(10):
            tokens = torch.randint(0, 4000, (30 + 30 * i,), generator=generator).tolist()
            answers = [(9, 20), (25, len(tokens))]
            sequence = Sequence(key=str(i), domain="d", token_ids=tokens, answers=answers, finish_reason="length")
            hidden = torch.randn(len(tokens) - 1, len(LAYERS), HIDDEN, generator=generator).bfloat16()
            writer.add(Captured(sequence, hidden))
    return folder


@pytest.mark.parametrize("form", [{}, {"num_layers": 2}, {"loss": "lk_hybrid"}])
def test_losses_gradients_and_proposals_are_those_of_the_cpu(states, tiny_llama, form):
    trainer = HeadTrainer(tiny_llama, states, CONFIG.model_copy(update=form))
    batch, found = trainer.batch(next(trainer.packs)), []
    for device, implementation in (("cuda", trainer.losses), ("cpu", None)):
        if implementation is None:
            from speculators.losses import resolve_loss_config

            trainer.model.to("cpu")
            trainer.device, trainer.losses = device, resolve_loss_config(trainer.config.loss, "eager")
        trainer.model.zero_grad()
        value = trainer.loss(batch, batch.trained)
        value.backward()
        gradients = {name: p.grad.cpu().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        found.append((value.detach().cpu(), gradients, trainer.acceptance()))
    (here, our, proposed), (there, their, expected) = found
    torch.testing.assert_close(here, there, rtol=1e-4, atol=0)
    for name, gradient in their.items():
        assert (our[name] - gradient).norm() <= 1e-3 * gradient.norm(), name
    assert proposed == expected


def test_a_head_trained_in_bfloat16_keeps_its_contract(states, tiny_llama, tmp_path):
    worker = TrainerWorker()
    losses = []
    for dtype in ("float32", "bfloat16"):
        worker.begin(tiny_llama, states, CONFIG.model_copy(update={"dtype": dtype}), None)
        worker.advance(8)
        losses.append(worker.trainer.curve.loss[1:])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    worker.export(tmp_path / "head", tokenizer_digest(tiny_llama), "bfloat16")
    contract.check(tmp_path / "head", tiny_llama)
    assert worker.expected().drafts > 0
