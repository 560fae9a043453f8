"""How much a search tries: all of it, what a constructor can afford, or one glance."""

from __future__ import annotations

from typing import NamedTuple


class SearchEffort(NamedTuple):
    """How many shapes are tried in one cut, how many of them in four, how many in `cuts`; of how
    many shapes how many cuts are varied; how many settings are simulated, of so many operations of
    all ranks together at most."""

    shapes: int
    in_four_cuts: int = 0
    in_all_cuts: int = 0
    cuts: int = 0
    varied: int = 0
    varied_cuts: int = 0
    simulated: int = 0
    simulated_operations: int = 0
    every_name: bool = True  # of shapes that several methods have
    ranks_of_even_chunks: int = 4096  # of more they are not tried
    ranks_of_even_variants: int = 4096  # of more not beside chunks of unlike work
    tolerance: float = 0.0  # what is so near to the bound of all shapes is good enough


SEARCH = SearchEffort(
    *(10_000, 6, 3, 12), varied=6, varied_cuts=2, simulated=40, simulated_operations=12_000
)
DEFAULT = SearchEffort(
    *(5, 2, 1, 5),
    varied=2,
    varied_cuts=1,
    simulated=2,
    simulated_operations=400,
    every_name=False,
    ranks_of_even_chunks=1024,
    ranks_of_even_variants=64,
    tolerance=0.02,
)
# Settings of many ranks take longer to look at.
DEFAULT_OF_MANY = DEFAULT._replace(in_four_cuts=1, cuts=4)
GLANCE = SearchEffort(1, every_name=False)
