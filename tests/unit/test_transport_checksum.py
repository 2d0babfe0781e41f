import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.transport.checksum import Margins, as_matrix, checksum, digests, margins_of, written
from infra.transport.flat import _copy_far, fill, lay_out, view

SHAPES = {"wide": (7, 300), "long": (900, 4), "norm": (33,)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
shapes = st.tuples(st.integers(2, 40), st.integers(2, 40))


def matrix(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(shapes, st.integers(0, 99), st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None)
def test_transposed_memory_gives_the_same(shape, seed, dtype):
    values = matrix(shape, seed, dtype)
    margins = Margins(*shape)
    margins.add(values.t().contiguous().t())
    assert margins.digest() == checksum(values)


@given(shapes, st.integers(0, 99), st.sampled_from(DTYPES), st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_is_seen(shape, seed, dtype, data):
    values = matrix(shape, seed, dtype)
    before = checksum(values)
    bits = values.view(torch.uint8).flatten()
    bits[data.draw(st.integers(0, bits.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(values) != before


@given(shapes, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_order_counts(shape, seed):
    values = matrix(shape, seed)
    digests = {checksum(v) for v in (values, values.flip(0), values.flip(1), values.roll(1, 0), values.roll(1, 1))}
    assert len(digests) == 5 or min(shape) == 2  # of two rows, flipping and rolling are the same
    if shape[0] == shape[1]:
        assert checksum(values.t()) != checksum(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_have_no_sign_and_numbers_below_the_normal_range_are_zeros(dtype):
    assert checksum(torch.tensor([0.0, 1.0], dtype=dtype)) == checksum(torch.tensor([-0.0, 1.0], dtype=dtype))
    tiny = torch.tensor([torch.finfo(dtype).tiny / 2, 1.0], dtype=dtype)
    same = checksum(tiny) == checksum(torch.tensor([0.0, 1.0], dtype=dtype))
    assert same == (dtype != torch.float16)  # half's smallest normal number is 6e-5: weights lie below it


def test_scalars_vectors_and_higher_ranks_are_matrices():
    for shape in ((), (5,), (5, 3), (5, 3, 2)):
        values = torch.randn(shape)
        assert as_matrix(values).shape[0] == (shape[0] if shape else 1)
        assert checksum(values) == checksum(as_matrix(values))


def test_large_tensors_are_summed_in_blocks():
    values = matrix((3000, 700), 0)
    margins = Margins(3000, 700)
    margins.add(values)
    assert checksum(values) == margins.digest()


def test_many_are_digested_at_once():
    tensors = [torch.randn(5, 7), torch.arange(9), torch.randn(3).bfloat16(), torch.tensor(2.0)]
    assert digests([margins_of(tensor) for tensor in tensors]) == [checksum(tensor) for tensor in tensors]
    assert digests([]) == []


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_tensors_of_one_shape_are_described_together_as_each_is(dtype):
    random = torch.Generator().manual_seed(3)
    named = {f"{name}.{n}": torch.randn(*shape, generator=random) for n in range(3) for name, shape in SHAPES.items()}
    named |= {"steps": torch.arange(5), "scale": torch.tensor(2.5)}
    tensors, slots, size = lay_out(named.items(), getattr(torch, dtype) if dtype else None)
    near, far = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    params = fill(near, tensors, slots)
    sums, totals = _copy_far(far, tensors, slots)  # what a GPU's tensors go through on their way to the host
    assert torch.equal(near, far) and written(sums) == [meta.checksum for meta in params]
    assert all(meta.checksum == checksum(view(near, meta)) for meta in params)
    assert torch.isfinite(totals).all()
    tensors["wide.1"][2, 3] = torch.inf
    _, totals = _copy_far(far, tensors, slots)
    assert [slot.name for slot, total in zip(slots, totals, strict=True) if not total.isfinite()] == ["wide.1"]
