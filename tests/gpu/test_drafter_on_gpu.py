"""What a drafter's trainer computes otherwise on a GPU: fused losses, flash attention, bfloat16, packs made and moved
by another thread."""

from dataclasses import replace

import pytest
import torch
from captured_states import add

from infra.config.drafter import DrafterConfig
from tasks.drafter import contract, ttt
from tasks.drafter.attention import Dense, Flash
from tasks.drafter.attention.base import Keys
from tasks.drafter.export import tokenizer_digest
from tasks.drafter.states import Captured, Sequence
from tasks.drafter.states_writer import StatesWriter
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
            add(writer, Captured(sequence, hidden))
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


@pytest.mark.parametrize("later", [0, 2])
def test_flash_kernels_attend_as_masked_products_do(later):
    """Two stretches of one document, fewer queries than keys, heads that share keys."""
    generator = torch.Generator("cuda").manual_seed(later)
    document_ids = torch.arange(4).repeat_interleave(torch.tensor([70, 5, 300, 41]))
    wanted = torch.tensor([*range(30, 69), 72, 73, *range(100, 160), *range(200, 375), *range(390, 416)])

    def drawn(rows, heads):
        return torch.randn(rows, heads, 64, generator=generator, device="cuda").bfloat16().requires_grad_()

    query, first = drawn(len(wanted), 9), (drawn(416, 3), drawn(416, 3))
    own = [(drawn(len(wanted), 3), drawn(len(wanted), 3)) for _ in range(later)]
    inputs, found = [query, *first, *(part for pair in own for part in pair)], []
    weight = torch.randn(len(wanted), 9, 64, generator=generator, device="cuda")
    for way in (Dense, Flash):
        given = inputs if way is Flash else [t.detach().float().requires_grad_() for t in inputs]
        pairs = [tuple(given[i : i + 2]) for i in range(1, len(given), 2)]
        attended = way.of(document_ids, wanted).to("cuda").attend(given[0] / 8, Keys(pairs[0], pairs[1:]))
        found.append([attended, *torch.autograd.grad((attended * weight).sum(), given)])
    for dense, flash in zip(*found, strict=True):
        assert (flash.float() - dense).norm() <= 0.03 * dense.norm()


@pytest.mark.parametrize("form", [{}, {"num_layers": 2}])
def test_flash_attention_trains_as_masked_products_do(states, tiny_llama, form):
    trainer = HeadTrainer(tiny_llama, states, CONFIG.model_copy(update={"dtype": "bfloat16", **form}))
    batch, found = trainer.batch(next(trainer.packs)), []
    assert isinstance(batch.plan.attention, Flash)
    for way, dtype in ((Flash, "bfloat16"), (Dense, "bfloat16"), (Dense, "float32")):
        trainer.config = trainer.config.model_copy(update={"dtype": dtype})
        asked = ttt.plan(batch, trainer.config.ttt_steps, trainer.config.num_layers, way)
        trainer.model.zero_grad()
        with trainer._precision():
            value = trainer.loss(replace(batch, plan=asked), batch.trained)
        value.backward()
        found.append([value.detach().clone(), *(p.grad.clone() for p in trainer.parameters.values())])
    for name, flash, dense, exact in zip(["loss", *trainer.parameters], *found, strict=True):
        error, usual = ((one - exact).norm() / exact.norm() for one in (flash, dense))
        assert error <= 2 * usual + 0.02, f"{name}: {error:.4f} in bfloat16, {usual:.4f} by masked products"


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
