"""A plan, proven, counted and drawn: no GPU, no torch, no processes.

    python examples/look_at_a_plan.py

A plan says for every rank what it computes, sends and receives, as data. What runs on a cluster
can so be read on a laptop first.
"""

import argparse

from mesh_attention import Mask, Problem, count, make_plan, verify
from mesh_attention.plan.read.draw import draw_assignment, draw_steps


def main() -> None:
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about.parse_args()  # there are no options but --help
    problem = Problem(q_tokens=9000, num_heads=8, head_dim=128, mask=Mask(causal=True))
    # Each rank a row of the matrix, as in a ring, and each a square.
    rows = make_plan(problem, 9, method="mesh", tile=(1, 9))
    tiles = make_plan(problem, 9, method="mesh", tile=(3, 3), chunks=(3, 3))

    for name, plan in (("rows", rows), ("tiles", tiles)):
        assert verify(plan) == []  # every visible pair once, every result at its owner, no deadlock
        for direction, counted in count(plan).items():
            most = max(rank.total.received_bytes for rank in counted.ranks)
            print(f"{name}, {direction}: a rank receives {most / 2**20:.1f} MiB at most")

    print("\nthe rank that computes each cell (queries down, keys across):")
    print(draw_assignment(tiles, tiles.forward))
    print("\nwhat a rank does, step by step (communication above, computation below):")
    print(draw_steps(tiles.forward.schedule))


if __name__ == "__main__":
    main()
