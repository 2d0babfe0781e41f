import pytest
import torch

from infra.transport.base import SyncError
from infra.transport.packed import check_packing, pack


@pytest.fixture(scope="module")
def matrix():
    return torch.randn(96, 160, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 160), (48, 33), (160, 96)])
def test_what_vllm_packs_is_what_was_given(matrix, dtype, shape):
    values = matrix.flatten().repeat(2)[: shape[0] * shape[1]].view(shape).to(dtype)
    for version in range(6):
        check_packing(pack(values), values, "w", version)


@pytest.mark.parametrize("column", [0, 47, 100, 159])
def test_a_change_of_the_last_bit_is_found_within_a_round_of_versions(matrix, column):
    wrong = matrix.clone()
    wrong.view(torch.int32)[50, column] += 1
    kernel, refused = pack(wrong), 0
    for version in range(4):  # 160 columns, 48 at a time
        try:
            check_packing(kernel, matrix, "w", version)
        except SyncError:
            refused += 1
    assert refused


@pytest.mark.parametrize("change", ["two columns", "two rows", "one value", "older"])
def test_another_matrix_is_found_at_once(matrix, change):
    wrong = matrix.clone()
    if change == "two columns":
        wrong[:, [100, 101]] = wrong[:, [101, 100]]
    elif change == "two rows":
        wrong[[3, 4]] = wrong[[4, 3]]
    elif change == "one value":
        wrong[9, 120] *= 1.1
    else:
        wrong *= 1 - 1e-3
    with pytest.raises(SyncError, match="w: the kernel that was packed for it does not multiply by the values"):
        check_packing(pack(wrong), matrix, "w", version=0)
