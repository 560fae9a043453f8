"""The adapter of cuDNN Frontend, as far as it goes without a GPU: intervals, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_cases import RANGES, MaskMaker
from torch import Tensor

from mesh_attention.kernels import MaskKind, Request, RowRange, visibility
from mesh_attention.kernels.cudnn_ranges import CudnnRanges, _aligned
from mesh_attention.kernels.visibility import dense_mask, interval_ends
from mesh_attention.plan.language.plan import Direction

CPU = torch.device("cpu")
HOPPER = Request(Direction.BACKWARD, "cuda", (9, 0), torch.bfloat16, 128, 128, 8, 2, MaskKind.RANGE)


def spread(ends: Tensor, num_keys: int) -> Tensor:
    """(S, T) bool, from `[0, F0) u [F1, F2) u ...`, whose numbers must never fall."""
    assert ends.dtype == torch.int32
    assert len(ends) % 2 == 1
    assert (ends.diff(dim=0) >= 0).all()
    key = torch.arange(num_keys)
    visible = key < ends[0][:, None]
    for begin, end in zip(ends[1::2], ends[2::2], strict=True):
        visible |= (key >= begin[:, None]) & (key < end[:, None])
    return visible


@pytest.mark.parametrize("maker", RANGES, ids=lambda maker: maker.__name__)
def test_intervals_show_what_the_mask_shows(maker: MaskMaker) -> None:
    for queries, keys in ((60, 60), (17, 90), (1, 2), (40, 9)):
        mask = maker(queries, keys)
        expected = dense_mask(mask, queries, keys, CPU)
        assert isinstance(mask, RowRange)
        assert expected is not None
        assert torch.equal(spread(interval_ends(mask, CPU), keys), expected)


def test_gathered_blocks_in_any_order_become_as_few_intervals_as_there_are() -> None:
    """Zigzag blocks 0, 3, 1, 2 of 4 keys each, causal: at most two intervals a query."""
    position = torch.cat([torch.arange(4) + 4 * block for block in (0, 3, 1, 2)])
    row = torch.arange(16)
    mask = RowRange(torch.zeros_like(row), row + 1, position)
    ends = interval_ends(mask, CPU)
    assert len(ends) == 3
    expected = dense_mask(mask, 16, 16, CPU)
    assert expected is not None
    assert torch.equal(spread(ends, 16), expected)


@pytest.mark.parametrize("maker", RANGES, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("most_cells", [1, 64, 1000])
def test_a_few_queries_at_a_time_have_the_same_intervals(
    maker: MaskMaker, most_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some see more intervals than others."""
    mask = maker(61, 90)
    assert isinstance(mask, RowRange)
    mask = replace(mask, key_position=mask.key_position[torch.randperm(90)])
    whole = interval_ends(mask, CPU)
    monkeypatch.setattr(visibility, "_MOST_CELLS", most_cells)
    assert torch.equal(interval_ends(mask, CPU), whole)


def test_padded_keys_are_in_no_interval() -> None:
    mask = RowRange(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2, 4]),
                    torch.tensor([0, 1, -1, -1, 2, 3]))  # fmt: skip
    assert spread(interval_ends(mask, CPU), 6).int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("positions", [[-1, 0, 1, 2], [2, 3, -1, 0, 1], [5, -1, -1, 0, 1, 2], []])
def test_the_first_key_after_padding_is_seen(positions: list[int]) -> None:
    mask = RowRange(torch.tensor([0, 1]), torch.tensor([10, 2]), torch.tensor(positions).long())
    seen = [[0 <= at < 10 for at in positions], [1 <= at < 2 for at in positions]]
    assert spread(interval_ends(mask, CPU), len(positions)).tolist() == seen


def test_what_it_cannot_do_is_refused_by_name() -> None:
    kernel = CudnnRanges()
    refused = {
        "runs on cuda": replace(HOPPER, device_type="cpu"),
        "compute capability": replace(HOPPER, capability=(8, 0)),
        "takes float16": replace(HOPPER, dtype=torch.float32),
        "for row ranges": replace(HOPPER, mask=MaskKind.FULL),
        "padded rows": replace(HOPPER, padded=True),
        "in runs": replace(HOPPER, scattered=True),
        "takes head sizes": replace(HOPPER, head_dim=136),
        "no backward pass for head sizes": replace(HOPPER, head_dim=192),
        "no multiple": replace(HOPPER, num_kv_heads=3),
    }
    for words, request in refused.items():
        assert words in (kernel.refuses(request) or "")
    message = kernel.refuses(HOPPER)
    assert message is None or "nvidia-cudnn-frontend" in message


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("from_first", [False, True])
def test_ascending_keys_have_the_intervals_that_are_found_by_looking(
    first: int, from_first: bool, gap: int
) -> None:
    position = torch.arange(first, first + 20) + gap * (torch.arange(20) // 5)
    row = torch.arange(30)
    lo = torch.zeros_like(row) if from_first else (row - 9).clamp(min=0)
    hi = (row + 1).clamp(max=26)
    looked = interval_ends(RowRange(lo, hi, position), CPU)
    message = interval_ends(RowRange(lo, hi, position, True, from_first), CPU)

    by_hand = (position >= lo[:, None]) & (position < hi[:, None])
    assert torch.equal(spread(looked, 20), by_hand)
    assert torch.equal(spread(message, 20), by_hand)
    assert message.shape[0] == (1 if from_first else 3)


@pytest.mark.parametrize("elements", [0, 1, 8])
def test_tensors_at_any_address_are_given_at_multiples_of_16_bytes(elements: int) -> None:
    buffer = torch.arange(8 * 64 + elements).to(torch.bfloat16)
    x = buffer[elements:].view(1, 4, 2, 64)
    inputs = _aligned(x)
    assert inputs.data_ptr() % 16 == 0
    assert torch.equal(inputs, x)
    assert (inputs.data_ptr() == x.data_ptr()) == (x.data_ptr() % 16 == 0)
