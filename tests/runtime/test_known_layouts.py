"""The layout of a tensor is known as long as it lives and nothing is written to it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.runtime.session.layouts import KnownLayouts

LAYOUT, RANKS = Layout(LayoutKind.ZIGZAG, 16, 2), (0, 1)


def test_a_tensor_and_its_views_are_known_until_something_is_written_to_them() -> None:
    layouts, x = KnownLayouts(), torch.zeros(8, 2)
    layouts.keep(x, LAYOUT, RANKS, 0)
    assert layouts.of(x) == (LAYOUT, RANKS, 2)
    assert layouts.of(x.view(4, 4)) == (LAYOUT, RANKS, 2)  # the stride of what was cut
    assert layouts.of(x.clone()) is None
    x[0] += 1
    assert layouts.of(x) is None
    assert layouts.of(x.view(4, 4)) is None
    layouts.keep(x, LAYOUT, RANKS, 0)
    assert layouts.of(x) == (LAYOUT, RANKS, 2)


def test_a_tensor_that_only_autograd_holds_stays_known_until_it_is_gone() -> None:
    layouts, x = KnownLayouts(), torch.zeros(8)
    layouts.keep(x, LAYOUT, RANKS, 0)
    product = torch.ones(8, requires_grad=True) * x
    del x
    gc.collect()
    saved = product.grad_fn._saved_other  # type: ignore[union-attr]
    assert layouts.of(saved) == (LAYOUT, RANKS, 1)
    del product, saved
    gc.collect()
    assert not layouts._of


def test_what_is_made_in_inference_mode_is_not_known() -> None:
    layouts = KnownLayouts()
    with torch.inference_mode():
        x = torch.zeros(8)
        layouts.keep(x, LAYOUT, RANKS, 0)
        assert layouts.of(x) is None


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_new_tensor_in_the_place_of_one_that_is_gone_is_not_known(in_a_cycle: bool) -> None:
    layouts = KnownLayouts()
    wrong: list[int] = []

    def make_and_drop() -> None:
        for at in range(2_000):
            x = torch.empty(1)
            if layouts.of(x) is not None:
                wrong.append(at)
            layouts.keep(x, LAYOUT, RANKS, 0)
            if in_a_cycle:
                holder: list[object] = [x]
                holder.append(holder)

    threads = [threading.Thread(target=make_and_drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert not layouts._of
