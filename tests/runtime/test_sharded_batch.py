"""What is read of a batch, what ranks compare of it, and what is left on a device: here the meta
device stands for one, whose numbers cannot be had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import MeshAttentionError
from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.runtime.agreement.identity import _sample
from mesh_attention.train.sharded_batch import _refuse_local_length
from mesh_attention.train.whole_batch import WholeBatch

IDS = torch.arange(6).reshape(1, 6)


def batch(check: bool | None = None, cu_seqlens: Any = None, **tensors: Tensor) -> WholeBatch:
    return WholeBatch(tensors, cu_seqlens, None, check)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_what_says_documents_is_not_read_from_a_device_in_silence(name: str) -> None:
    whole = WholeBatch({"input_ids": IDS, name: IDS.to("meta")}, None, None, None)
    with pytest.raises(MeshAttentionError, match=f"{name} is on meta"):
        whole.rows()


def test_positions_on_a_device_are_taken_as_they_are_beside_cu_seqlens() -> None:
    whole = batch(cu_seqlens=[0, 2, 6], input_ids=IDS, position_ids=IDS.to("meta"))
    assert whole.rows() == [(0, 2, 6)]


def test_a_mask_on_a_device_is_refused_beside_cu_seqlens_too() -> None:
    with pytest.raises(MeshAttentionError, match="attention_mask is on meta"):
        batch(cu_seqlens=[0, 2, 6], input_ids=IDS, attention_mask=IDS.to("meta")).rows()


def changed(check: bool | None, x: Tensor) -> bool:
    """Whether ranks would see that one number is another."""
    other = x.clone()
    other[0, 3] = 0
    return batch(check, x=x).contents() != batch(check, x=other).contents()


def test_whole_numbers_are_compared_and_others_on_demand() -> None:
    floating = IDS.to(torch.bfloat16)
    assert changed(None, IDS)
    assert changed(None, IDS.bool())
    assert not changed(None, floating)
    assert changed(True, floating)
    assert changed(True, IDS)
    assert not changed(False, IDS)


def test_of_a_call_without_a_batch_whole_numbers_at_hand_are_compared() -> None:
    assert _sample(IDS) == _sample(IDS.clone()) != _sample(IDS + 1)
    assert [_sample(x) for x in (IDS.float(), IDS.to("meta"), IDS[:, :0])] == [""] * 3


def test_shapes_and_types_are_compared_always() -> None:
    for check in (None, False):
        message = batch(check, x=IDS.to("meta")).contents()
        assert message == "x int64 [1, 6]"
        assert batch(check, x=IDS.to("meta").int()).contents() != message
        assert batch(check, x=IDS.to("meta")[:, 1:]).contents() != message


def object_of(tokens: int | None) -> Any:
    def shards(documents: None, *, is_asked: bool) -> Any:
        if tokens is None:
            raise PlanError("no length")
        return SimpleNamespace(q_layout=Layout(LayoutKind.ZIGZAG, tokens, 2))

    return SimpleNamespace(shards=shards)


def test_a_batch_on_a_device_that_is_as_long_as_a_shard_is_refused() -> None:
    there = batch(input_ids=IDS.to("meta"))
    with pytest.raises(MeshAttentionError, match="as a shard of 11 has"):
        _refuse_local_length(object_of(11), there)
    for tokens in (6, 13, None):
        _refuse_local_length(object_of(tokens), there)
    _refuse_local_length(object_of(11), batch(input_ids=IDS))  # ranks compare its numbers
