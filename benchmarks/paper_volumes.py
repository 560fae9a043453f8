"""The paper's table of volumes per GPU, counted from our own plans (algorithm.md, section 8).

    python benchmarks/paper_volumes.py

256 GPUs, 8 a node, 512K tokens, 64 heads of 128, bf16. O is gathered in the backward pass, as the
authors do; numbers are the largest over ranks and nodes. StarTrail's placement is counted for every
rank there, so it begins with the next team's block here; its backward figures are those of C = 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from script import script_parser

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


_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD
# Chunks cut what moves and change no volume; one is counted in a fifth of the time.
_MESH = {"method": "mesh", "tile": (16, 16), "alpha": 4, "chunks": (1, 1)}
_WIDE = _MESH | {"tile": (32, 8)}
_STAR = {"method": "startrail", "first_block": "next", "combine": "reduce-scatter"}
_RING = {"method": "ring", "gradients": "travel"}
_USP = {"method": "usp", "ulysses": 8}
CELLS = (
    Cell("forward", "mesh 16x16", _FORWARD, False, _MESH, "1.9", "0.6"),
    Cell("forward", "ring", _FORWARD, False, _RING, "15.9", "2.0"),
    Cell("forward", "usp U=8", _FORWARD, False, _USP, "2.0", "1.9"),
    Cell("forward", "startrail C=8", _FORWARD, False, _STAR | {"team": 8}, "2.9", "2.0"),
    Cell("backward", "mesh 16x16", _BACKWARD, False, _MESH, "3.8", "1.3"),
    Cell("backward", "ring", _BACKWARD, False, _RING, "31.9", "4.0"),
    Cell("backward", "usp U=8", _BACKWARD, False, _USP, "4.0", "3.9"),
    Cell("backward", "startrail C=16", _BACKWARD, False, _STAR | {"team": 16}, "5.8", "2.3"),
    Cell("causal forward", "mesh 32x8", _FORWARD, True, _WIDE, "2.4", "0.6"),
    Cell("causal forward", "ring", _FORWARD, True, _RING, "15.9", "2.0"),
    Cell("causal forward", "usp U=8", _FORWARD, True, _USP, "2.0", "1.9"),
)


def count_cell(cell: Cell) -> tuple[str, str]:
    """GiB in all and from other nodes that the busiest rank and node receive, as the paper prints
    them."""
    problem = Problem(q_tokens=1 << 19, num_heads=64, head_dim=128, mask=Mask(causal=cell.causal))
    options = cell.options | {"ranks_per_node": 8, "gather_out": True}
    plan = make_plan(problem, 256, directions=(cell.direction,), **options)
    numbers = count(plan)[cell.direction].to_json()
    total, inter_node = numbers["bytes_per_rank"], numbers["inter_node_bytes_per_rank"]
    return f"{total['max'] / GIB:.1f}", f"{inter_node['max'] / GIB:.1f}"


def main() -> None:
    script_parser(__doc__, result=False).parse_args()
    lines = [["", "", "counted", "paper", ""]]
    for cell in CELLS:
        counted, printed = count_cell(cell), (cell.total, cell.inter_node)
        verdict = "agrees" if counted == printed else "differs"
        lines.append([cell.row, cell.column, " / ".join(counted), " / ".join(printed), verdict])
    print("256 GPUs, 8 a node, 512K tokens, 64 heads of 128, bf16: GiB per GPU, total / inter-node")
    print(table(lines))


if __name__ == "__main__":
    main()
