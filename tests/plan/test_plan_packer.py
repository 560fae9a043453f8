"""Boundaries of documents as people write them, and a packer that travels to other processes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesh_attention import Mask, Problem
from mesh_attention.choose.ask import ask
from mesh_attention.choose.pack import Layer, Packer, document_starts
from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.read.verify import verify

PROBLEM = Problem(64, 4, 8, num_kv_heads=2, mask=Mask(causal=True), element_bytes=4)


@pytest.mark.parametrize(
    ("cu_seqlens", "starts", "rows"),
    [
        ([0, 5, 9], (0, 5, 9), 1),
        (np.array([0, 5, 9], dtype=np.int32), (0, 5, 9), 1),
        ((0, 0, 1, 1), (0, 0, 1, 1), 1),
        ([[0, 5, 9], [0, 9]], (0, 5, 9, 18), 2),
        ([np.array([0, 4]), [0, 1, 4]], (0, 4, 5, 8), 2),
    ],
)
def test_starts_are_read_from_lists_arrays_and_rows(
    cu_seqlens: Any, starts: tuple[int, ...], rows: int
) -> None:
    assert document_starts("cu_seqlens", cu_seqlens) == (starts, rows)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([], "give cumulative starts"),
        ("0, 5", "give cumulative starts"),
        (7, "give cumulative starts"),
        ([0], "give cumulative starts"),
        ([1, 5], "give cumulative starts"),
        ([0, 5, 4], "give cumulative starts"),
        ([0, 5.0], "whole number"),
        ([0, True], "whole number"),
        ([0, 0], "no token"),
        ([[0, 5], [0, 6]], "row 1 ends at 6, and the rows before at 5"),
        ([[0, 5], [1, 5]], "row 1: give cumulative starts"),
    ],
)
def test_other_starts_are_refused_in_a_sentence(cu_seqlens: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        document_starts("cu_seqlens", cu_seqlens)


class _OnGpu:
    class device:  # noqa: N801
        type = "cuda"


def test_starts_on_a_gpu_are_refused_since_the_host_would_wait() -> None:
    with pytest.raises(PlanError, match="keep a copy on the CPU"):
        document_starts("cu_seqlens", _OnGpu())


def test_a_packer_and_its_packs_travel_and_equal_batches_have_equal_packs() -> None:
    packer = Packer((Layer(PROBLEM), Layer(PROBLEM)), 4)
    there = pickle.loads(pickle.dumps(packer))
    pack = packer([0, 20, 64])
    assert pickle.loads(pickle.dumps(pack)) == pack == there([0, 20, 64])
    assert pack.words == there([0, 20, 64]).words != packer([0, 21, 64]).words
    assert pack.question(packer.layers[0]) == there([0, 20, 64]).question(packer.layers[0])


def test_plans_of_packs_are_proven_for_a_layer_that_was_not_told_too() -> None:
    packer = Packer((Layer(PROBLEM),), 3)
    window = Layer(Problem(64, 4, 8, mask=Mask(causal=True, window=(3, 0)), element_bytes=4))
    for starts in ([0, 20, 50], [0, 7], [0, 1, 2, 90]):
        pack = packer(starts)
        for layer in (*packer.layers, window):
            plan = pack.question(layer).plan()
            assert verify(plan) == []
            assert plan.q_layout == pack.layout
            assert plan.problem.mask.documents == tuple(starts)


def test_a_layout_or_a_method_that_the_caller_wants_is_taken() -> None:
    wanted = Packer((Layer(PROBLEM, layout=LayoutKind.CONTIGUOUS),), 4)([0, 20, 64])
    assert wanted.layout.kind is LayoutKind.CONTIGUOUS
    layer = Layer(PROBLEM, question=ask(PROBLEM, 4, method="ring", layout="zigzag"))
    pack = Packer((layer,), 4)([0, 20, 64])
    assert pack.layout.kind is LayoutKind.ZIGZAG
    assert pack.question(layer).plan().method == "ring"
    assert pack.reason == "as given: ring"


def test_documents_of_keys_are_as_many_as_those_of_queries() -> None:
    packer = Packer((Layer(PROBLEM),), 2)
    apart = packer([0, 20, 64], [0, 5, 9])
    assert apart.kv_layout.num_tokens == 9
    with pytest.raises(PlanError, match="same number of documents"):
        packer([0, 20, 64], [0, 9])


@pytest.mark.parametrize(
    ("masks", "layout"),
    [
        ([Mask()], LayoutKind.CONTIGUOUS),
        ([Mask(causal=True)], LayoutKind.ZIGZAG),
        ([Mask(causal=True, window=(9, 0))], LayoutKind.ZIGZAG),
        ([Mask(), Mask(causal=True)], LayoutKind.ZIGZAG),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tokens", [16, 61])
def test_one_sequence_is_cut_as_tensors_without_documents_are(
    masks: list[Mask], layout: LayoutKind, tokens: int
) -> None:
    layers = tuple(Layer(replace(PROBLEM, mask=mask)) for mask in masks)
    assert Packer(layers, 4)([0, tokens]).layout_kind is layout
