"""What the trainer computes otherwise on a GPU: attention in one call, the head, bfloat16 under FSDP2, matched bits."""

import numpy as np
import pytest
import torch
from rl_batches import batch, write_model

from infra.config.rl import MismatchBounds, RLConfig
from tasks.rl import attention
from tasks.rl.attention import Layout
from tasks.rl.batch import TrainingBatch, TrainingGroup
from tasks.rl.head import token_logprobs
from tasks.rl.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")

LAX = MismatchBounds(warn_k3=1e9, stop_k3=1e9)
LAYOUT = [(40, [17, 300, 1, 64]), (9, [700]), (130, [5, 5, 260])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def row(layout, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query of 9 heads, key and value of 3, of 64 values, as SmolLM2's."""
    torch.manual_seed(0)
    tokens = sum(prompt + sum(answers) for prompt, answers in layout)
    return [torch.randn(1, heads, tokens, 64, device="cuda").to(dtype).requires_grad_() for heads in (9, 3, 3)]


def attend(tensors: list[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """The result and the gradients of query, key and value."""
    out, _ = attention.attention(torch.nn.Identity(), *tensors, None, scaling=0.125, layout=layout)
    out.float().square().sum().backward()
    return [out.detach().float(), *(tensor.grad.float() for tensor in tensors)]


@pytest.mark.parametrize("whole_keys", [False, True])
def test_one_call_of_flash_attention_gives_what_spans_give(whole_keys):
    half = row(LAYOUT, torch.bfloat16)
    exact = [tensor.detach().float().requires_grad_() for tensor in half]
    found = attend(half, Layout(LAYOUT, "cuda", whole_keys=whole_keys))
    wanted = attend(exact, Layout(LAYOUT, "cuda"))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() / other.norm() < 0.01


def test_what_else_is_in_the_row_decides_no_bit_of_whole_keys():
    tensors = [tensor.detach() for tensor in row(LAYOUT, torch.bfloat16)]
    last = LAYOUT[2:]
    own = [tensor[:, :, -sum([last[0][0], *last[0][1]]) :].contiguous() for tensor in tensors]
    with torch.no_grad():
        whole, _ = attention.attention(
            torch.nn.Identity(), *tensors, None, scaling=0.125, layout=Layout(LAYOUT, "cuda", whole_keys=True)
        )
        alone, _ = attention.attention(
            torch.nn.Identity(), *own, None, scaling=0.125, layout=Layout(last, "cuda", whole_keys=True)
        )
    assert torch.equal(whole[:, -alone.shape[1] :], alone)


@pytest.mark.parametrize("float32", [False, True])
def test_the_head_gives_log_probs_of_half_precision_states(float32):
    torch.manual_seed(0)
    states, weight = (torch.randn(n, 64, device="cuda").bfloat16().requires_grad_() for n in (50, 1000))
    target = torch.arange(50, device="cuda")
    found = token_logprobs(states, weight, target, 0.7, float32=float32)
    found.sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (states, weight)]
    wanted = ((exact[0] @ exact[1].t()) / 0.7).log_softmax(-1).gather(1, target[:, None])[:, 0]
    wanted.sum().backward()
    assert (found.double() - wanted).abs().max() < (1e-4 if float32 else 0.1)
    for one, other in zip((states, weight), exact, strict=True):
        assert (one.grad.double() - other.grad).norm() / other.grad.norm() < 0.02


@pytest.mark.parametrize("numerics", ["fast", "matched"])
def test_a_step_in_bfloat16_is_near_the_one_in_float32(model, numerics):
    wide, narrow = (
        Trainer(model, RLConfig(trainer_dtype=dtype, numerics=numerics, mismatch=LAX, gradient_checkpointing=again))
        for dtype, again in (("float32", False), ("bfloat16", True))
    )
    assert wide.device.type == narrow.device.type == "cuda"
    one, other = wide.step(batch()), narrow.step(batch())
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.1)
    assert other["entropy"] == pytest.approx(one["entropy"], rel=0.02)
    for name, weight in narrow.named_weights():
        assert weight.dtype == torch.float32 and weight.is_cuda and bool(weight.isfinite().all()), name


def test_empty_answers_and_long_ones_share_a_step(model):
    random = np.random.default_rng(0)
    lengths = [0, 1, 900, 3]
    group = TrainingGroup(
        random.integers(0, 97, 20),
        [random.integers(0, 97, n) for n in lengths],
        [np.full(n, -4.5) for n in lengths],
        [1.0, -1.0, 0.5, -0.5],
    )
    settings = RLConfig(trainer_dtype="bfloat16", micro_batch_tokens=512, mismatch=LAX)
    figures = Trainer(model, settings).step(TrainingBatch([group], 1.0, longest=900))
    assert figures["micro_batches"] == 2 and np.isfinite(figures["loss"])
