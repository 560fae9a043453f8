"""`verify` proves every mesh of up to 64 ranks, and hundreds of random problems."""

from __future__ import annotations

from itertools import cycle, islice, product
from random import Random

import pytest

from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from support.listed import stretches_for
from support.sample import sample

ALL_MANNERS = 7  # up to so many ranks every layout and mask is proven for every tile
TWO_MANNERS = 10
ALL_TILES = 20
MOST = 64
MANNERS = tuple(product(LayoutKind, (False, True)))


def prove_every_mesh(n: int, manners: int, *, tiles: int | None = None) -> None:
    """So many layouts and masks for each tile, in turn. Settings that multiply the cases are taken
    in turn too, so that each occurs with every other. `tiles`: so many of them, in turn by n."""
    fitting = list(factorisations(n))
    if tiles is not None:
        fitting = list(islice(cycle(fitting), n % len(fitting), n % len(fitting) + tiles))
    chunks = cycle(((1, 1), (2, 1), (1, 2), (2, 2), (1, 1)) if n <= 20 else ((1, 1),))
    combine = cycle((Combine.EXCHANGE, Combine.REDUCE_SCATTER, Combine.REDUCE_SCATTER))
    gather_out = cycle((False, True, False, False, True))
    turn = cycle(MANNERS[n % len(MANNERS) :] + MANNERS[: n % len(MANNERS)])
    for tile in fitting:
        for layout, causal in islice(turn, manners):
            setting = MeshSetting(
                tile=tile,
                layout=layout,
                stretches=stretches_for(layout, Random(n), 4 * n, n),
                chunks=next(chunks),
                combine=next(combine),
                gather_out=next(gather_out),
            )
            problem = Problem(4 * n, num_heads=1, head_dim=4, mask=Mask(causal=causal))
            findings = verify(box_plan(problem, n, setting))
            assert not findings, (setting, [str(f) for f in findings])


@pytest.mark.parametrize("n", range(1, ALL_MANNERS + 1))
def test_every_factorisation_in_every_layout_causal_and_not_is_proven_both_passes(n: int) -> None:
    prove_every_mesh(n, len(MANNERS))


@pytest.mark.parametrize("n", sample(range(ALL_MANNERS + 1, ALL_TILES + 1), 2))
def test_every_factorisation_up_to_20_is_proven_with_layouts_and_masks_in_turn(n: int) -> None:
    prove_every_mesh(n, 2 if n <= TWO_MANNERS else 1)


@pytest.mark.parametrize(
    "n",
    [pytest.param(n, marks=[pytest.mark.slow] * (n > 30)) for n in range(ALL_TILES + 1, MOST + 1)],
)
def test_one_factorisation_of_every_number_up_to_64_is_proven(n: int) -> None:
    prove_every_mesh(n, 1, tiles=1)


@pytest.mark.slow
@pytest.mark.parametrize("n", range(ALL_MANNERS + 1, MOST + 1))
def test_every_factorisation_up_to_64_is_proven_in_every_layout_causal_and_not(n: int) -> None:
    prove_every_mesh(n, len(MANNERS))


def test_progress_is_told_up_to_the_last_operation() -> None:
    plan = box_plan(Problem(64, 1, 4), 4, MeshSetting(chunks=(4, 4)))
    progress_calls: list[tuple[int, int]] = []
    verify(plan, progress=lambda done, total: progress_calls.append((done, total)))
    total = sum(len(p.operations) for pass_ in plan.passes for p in pass_.programs)
    assert progress_calls[-1] == (total, total)
