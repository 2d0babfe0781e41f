"""Flash attention of a head's training gives what masked products give, by kernels that stand in for a GPU's."""

import pytest
import torch

from infra.config.drafter import DrafterConfig
from tasks.drafter.attention import Dense, Flash, fits
from tasks.drafter.attention.base import Keys

LENGTHS, HEADS, KEY_HEADS, SIZE = (7, 1, 40, 12), 4, 2, 8


class OneByOne:
    """What PyTorch's kernels compute, stretch after stretch; backwards from the output and the sum they are given."""

    dtype = torch.float32

    @staticmethod
    def stretches(layout):
        ends = zip(layout.query_ends.tolist(), layout.key_ends.tolist(), strict=True)
        (q, k), *rest = ends
        for next_q, next_k in rest:
            yield slice(q, next_q), slice(k, next_k)
            q, k = next_q, next_k

    @staticmethod
    def scores(query, key):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        found = torch.einsum("qhd,khd->hqk", query, key)
        ahead = torch.ones(found.shape[1:], dtype=torch.bool).triu(len(key) - len(query) + 1)
        return found.masked_fill(ahead, -torch.inf)

    @classmethod
    def forward(cls, query, key, value, layout):
        out, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
        for q, k in cls.stretches(layout):
            assert q.stop - q.start <= layout.most_queries and k.stop - k.start <= layout.most_keys
            scores = cls.scores(query[q], key[k])
            sums[:, q] = scores.logsumexp(-1)
            values = value[k].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return out, sums, None

    @classmethod
    def backward(cls, gradient, tensors, state, layout):
        query, key, value, out, sums = tensors
        found = [torch.zeros_like(t) for t in (query, key, value)]
        each = query.shape[1] // key.shape[1]
        for q, k in cls.stretches(layout):
            shares = (cls.scores(query[q], key[k]) - sums[:, q, None]).exp()
            keys, values = (t[k].repeat_interleave(each, dim=1) for t in (key, value))
            by_share = torch.einsum("qhd,khd->hqk", gradient[q], values)
            by_score = shares * (by_share - (gradient[q] * out[q]).sum(-1).mT[..., None])
            found[0][q] += torch.einsum("hqk,khd->qhd", by_score, keys)
            for goal, weights, source in ((found[1], by_score, query), (found[2], shares, gradient)):
                goal[k] += torch.einsum("hqk,qhd->khd", weights, source[q]).unflatten(1, (-1, each)).sum(2)
        return found


@pytest.mark.parametrize("later", [0, 1, 2])
@pytest.mark.parametrize("asked", ["answers", "all", "last"])
def test_flash_attention_and_its_gradients_are_those_of_masked_products(later, asked):
    generator = torch.Generator().manual_seed(later)
    document_ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    rows = len(document_ids)
    wanted = {
        "all": torch.arange(rows),
        "answers": torch.tensor([2, 3, 4, *range(20, 31), *range(35, 40), 47, 48, 50, 58]),  # two of one document
        "last": torch.tensor([rows - 1]),
    }[asked]

    def drawn(count, heads):
        return torch.randn(count, heads, SIZE, generator=generator, requires_grad=True)

    query, first = drawn(len(wanted), HEADS), (drawn(rows, KEY_HEADS), drawn(rows, KEY_HEADS))
    own = [(drawn(len(wanted), KEY_HEADS), drawn(len(wanted), KEY_HEADS)) for _ in range(later)]
    inputs = [query, *first, *(part for pair in own for part in pair)]
    weight, found = torch.randn(len(wanted), HEADS, SIZE, generator=generator), []
    for attended in (
        Dense.of(document_ids, wanted).attend(query, Keys(first, own)),
        Flash.of(document_ids, wanted).attend(query, Keys(first, own), OneByOne),
    ):
        found.append([attended, *torch.autograd.grad((attended * weight).sum(), inputs)])
    for dense, flash in zip(*found, strict=True):
        torch.testing.assert_close(flash, dense, rtol=1e-4, atol=1e-5)


def test_without_rows_nothing_is_attended():
    nothing, document_ids = torch.zeros(0, dtype=torch.long), torch.zeros(5, dtype=torch.long)
    for way in (Dense, Flash):
        assert way.of(document_ids, nothing).attend(torch.zeros(0, HEADS, SIZE), Keys(())).shape == (0, HEADS, SIZE)


def test_flash_is_for_gpus_in_bfloat16():
    mixed = DrafterConfig(dtype="bfloat16")
    assert fits("cuda", mixed) is Flash
    for device, config in (
        ("cuda", DrafterConfig()),
        ("cpu", mixed),
        ("cuda", mixed.model_copy(update={"attention": "dense"})),
    ):
        assert fits(device, config) is Dense
