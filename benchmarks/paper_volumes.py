"""The paper's table of volumes per GPU, counted from our own plans (algorithm.md, section 8).

    python benchmarks/paper_volumes.py [--json]

256 GPUs, 8 a node, 512K tokens, 64 heads of 128, bf16. O is gathered in the backward pass, as the
authors do; numbers are the largest over ranks and nodes. StarTrail's placement is counted for every
rank there, so it begins with the next team's block here; its backward figures are those of C = 16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_attention.choose.ask import make_plan
from mesh_attention.cli.output import table
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Cell:
    row: str
    column: str
    direction: Direction
    causal: bool
    options: dict[str, Any]
    total: str  # GiB as the paper prints them
    inter_node: str
    note: str = ""  # why ours differs, where it does


@dataclass(frozen=True, slots=True)
class CountedCell:
    cell: Cell
    total_gib: float
    inter_node_gib: float

    @property
    def agrees(self) -> bool:
        found = (f"{self.total_gib:.1f}", f"{self.inter_node_gib:.1f}")
        return found == (self.cell.total, self.cell.inter_node)

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.cell.row,
            "column": self.cell.column,
            "total_gib": self.total_gib,
            "inter_node_gib": self.inter_node_gib,
            "paper": [self.cell.total, self.cell.inter_node],
            "agrees": self.agrees,
            "note": self.cell.note,
        }


_USP_NOTE = (
    "ours swaps Q, K, V and O again, since only the caller's shards are kept for the backward "
    "pass; the paper's count keeps the swapped tensors"
)


def _cells() -> tuple[Cell, ...]:
    forward, backward = Direction.FORWARD, Direction.BACKWARD
    # Chunks cut what moves and change no volume; one is counted in a fifth of the time.
    mesh = {"method": "mesh", "tile": (16, 16), "alpha": 4, "chunks": (1, 1)}
    wide = mesh | {"tile": (32, 8)}
    star = {"method": "startrail", "first_block": "next", "combine": "reduce-scatter"}
    ring = {"method": "ring", "gradients": "travel"}
    usp = {"method": "usp", "ulysses": 8}
    return (
        Cell("forward", "mesh 16x16", forward, False, mesh, "1.9", "0.6"),
        Cell("forward", "ring", forward, False, ring, "15.9", "2.0"),
        Cell("forward", "usp U=8", forward, False, usp, "2.0", "1.9"),
        Cell("forward", "startrail C=8", forward, False, star | {"team": 8}, "2.9", "2.0"),
        Cell("backward", "mesh 16x16", backward, False, mesh, "3.8", "1.3"),
        Cell("backward", "ring", backward, False, ring, "31.9", "4.0"),
        Cell("backward", "usp U=8", backward, False, usp, "4.0", "3.9", _USP_NOTE),
        Cell("backward", "startrail C=16", backward, False, star | {"team": 16}, "5.8", "2.3"),
        Cell("causal forward", "mesh 32x8", forward, True, wide, "2.4", "0.6"),
        Cell("causal forward", "ring", forward, True, ring, "15.9", "2.0"),
        Cell("causal forward", "usp U=8", forward, True, usp, "2.0", "1.9"),
    )


CELLS = _cells()


def count_cell(cell: Cell) -> CountedCell:
    problem = Problem(q_tokens=1 << 19, num_heads=64, head_dim=128, mask=Mask(causal=cell.causal))
    plan = make_plan(
        problem,
        256,
        directions=(cell.direction,),
        ranks_per_node=8,
        gather_out=True,
        **cell.options,
    )
    numbers = count(plan)[cell.direction].to_json()
    return CountedCell(
        cell,
        numbers["bytes_per_rank"]["max"] / GIB,
        numbers["inter_node_bytes_per_rank"]["max"] / GIB,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON instead")
    given = parser.parse_args()
    cells = [count_cell(cell) for cell in CELLS]
    print(json.dumps([cell.to_json() for cell in cells]) if given.json else text_of(cells))


def text_of(cells: Sequence[CountedCell]) -> str:
    lines = [["", "", "counted", "paper", ""]]
    for cell in cells:
        counted = f"{cell.total_gib:.1f} / {cell.inter_node_gib:.1f}"
        paper = f"{cell.cell.total} / {cell.cell.inter_node}"
        verdict = "agrees" if cell.agrees else "differs"
        lines.append([cell.cell.row, cell.cell.column, counted, paper, verdict])
    return "\n".join(
        [
            "256 GPUs, 8 a node, 512K tokens, 64 heads of 128, bf16: GiB per GPU, "
            "total / inter-node",
            table(lines),
            *(
                f"{cell.cell.row}, {cell.cell.column}: {cell.cell.note}"
                for cell in cells
                if not cell.agrees and cell.cell.note
            ),
        ]
    )


if __name__ == "__main__":
    main()
