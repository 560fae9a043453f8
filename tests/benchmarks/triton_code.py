"""What our Triton attention kernels are compiled to for a GPU that need not be there.

    PYTHONPATH=src:benchmarks python tests/benchmarks/triton_code.py --capability 90 --head-dim 128

Prints JSON; `test_triton_code.py` runs it in a process without Triton's interpreter. For each pass,
with the tile of the table or the tile asked for: registers, stack, shared memory, and of each inner
loop (on Hopper whole blocks, then masked ones) its instructions, matrix products, reloads of
spilled registers, and copies from memory by their width in bytes (none where the hardware's own
unit loads whole tiles). Row numbers that are copied by four bytes, or under a mask, slow a loop
down by a fifth, which no test of results sees.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
from script import script_parser
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped,unused-ignore]

from mesh_attention.kernels.fused.attention_backward import (
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
)
from mesh_attention.kernels.fused.attention_forward import attention_forward_kernel
from mesh_attention.kernels.launches import KernelTile, padded
from mesh_attention.kernels.triton_ranges import tiles_for

KERNELS = {
    "forward": attention_forward_kernel,
    "backward_queries": attention_backward_queries_kernel,
    "backward_keys": attention_backward_keys_kernel,
}
CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)
TYPES = (
    dict.fromkeys(("q", "k", "v", "grad_out", "out", "dq", "dk", "dv"), "*bf16")
    | dict.fromkeys(("lse", "delta", "statistics"), "*fp32")
    | dict.fromkeys(("lo", "hi", "key_position", "runs", "table"), "*i32")
    | dict.fromkeys(("scale", "inner_scale", "softmax_scale"), "fp32")
)
_COPY = re.compile(r"LDGSTS(?:\.[A-Z]+)*(?:\.(64|128))?\b")


def compiled(name: str, tile: KernelTile, block: int, args: argparse.Namespace) -> Any:
    """For bf16, one interval a query, and tensors whose strides are multiples of 16."""
    kernel = KERNELS[name]
    D, E = args.head_dim, args.v_head_dim
    constants = {
        "REPEATS": args.heads_per_kv_head,
        "D": D,
        "E": E,
        "D_PADDED": padded(D),
        "E_PADDED": padded(E),
        "SCORES": 0,
        "INTERVALS": 1,
        "BLOCK": block,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "DESCRIBED": tile.described,
        "AHEAD": args.ahead,
    }
    inner = tile.rows if name == "backward_keys" else tile.keys
    widths = {"v_described": padded(E), "grad_described": padded(E)}
    signature: dict[str, str] = {}
    values: dict[tuple[int], Any] = {}
    known: dict[tuple[int], list[list[Any]]] = {}
    for at, parameter in enumerate(kernel.params):
        argument = parameter.name
        described = argument.endswith("_described")
        if described and tile.described:
            width = widths.get(argument, padded(D))
            signature[argument] = f"tensordesc<bf16[1, {inner}, 1, {width}]>"
            continue
        if argument in constants or described:
            signature[argument], values[(at,)] = "constexpr", constants.get(argument)
            continue
        signature[argument] = TYPES.get(argument, "i32")
        if signature[argument] != "fp32" and not parameter.do_not_specialize:
            known[(at,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs=values, attrs=known
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", args.capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )


def machine_code(kernel: Any) -> tuple[str, str]:
    """(resource usage, assembly), by the tools that come with Triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True)
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )
    for done in (usage, code):
        if done.returncode:
            raise SystemExit(f"{done.args[0]}: {done.stderr.strip()}")
    return usage.stdout, code.stdout


def loops(code: str) -> list[list[str]]:
    """Instructions of the inner loops that have matrix products, in their order."""
    lines = code.splitlines()
    labels = {m[1]: at for at, x in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", x))}
    ranges = []
    for at, line in enumerate(lines):
        back = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if back and labels.get(back[1], at) < at:
            ranges.append(range(labels[back[1]], at + 1))
    ranges = [loop for loop in ranges if any("MMA" in lines[at] for at in loop)]
    # What waits for a copy stands behind all loops, and jumps back into the middle of one.
    inner = [
        loop
        for loop in ranges
        if not any(loop.start <= x.start and x.stop <= loop.stop for x in ranges if x != loop)
    ]
    return [[lines[at] for at in loop if ";" in lines[at]] for loop in inner]


def masked_loads(ir: str) -> list[str]:
    """Loads of single row numbers, under a mask, in the loops of Triton's own code."""
    depth, loads = 0, []
    for line in ir.splitlines():
        if "scf.for" in line or "scf.while" in line:
            depth += 1
        elif depth and re.match(r"\s*}", line):
            depth -= 1
        load = re.search(r"tt\.load ([^:{]*).* : tensor<(\d+)x!tt\.ptr", line)
        if depth and load and "," in load[1]:
            loads.append(line.strip())
    return loads


def report(name: str, tile: KernelTile, block: int, args: argparse.Namespace) -> dict[str, Any]:
    try:
        kernel = compiled(name, tile, block, args)
    except Exception as error:  # Triton's errors have no common kind
        raise SystemExit(f"{name}, tile {tuple(tile)}: {type(error).__name__}: {error}") from None
    usage, code = machine_code(kernel)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    rows = []
    for body in loops(code):
        widths = Counter(int(m[1] or 32) // 8 for x in body if (m := _COPY.search(x)))
        rows.append(
            {
                "instructions": len(body),
                "products": sum("MMA" in x for x in body),
                "spill_stores": sum(" STL" in x for x in body),
                "spill_loads": sum(" LDL" in x for x in body),
                "copies_by_bytes": dict(sorted(widths.items())),
            }
        )
    if not rows:
        raise SystemExit(f"{name}, tile {tuple(tile)}: no loop with matrix products was found")
    return {
        "pass": name,
        "tile": list(tile),
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": kernel.metadata.shared,
        "masked_loads_in_loops": masked_loads(kernel.asm["ttir"]),
        "loops": rows,
    }


def main() -> None:
    parser = script_parser(__doc__, result=False)
    parser.add_argument("--capability", type=int, default=90, choices=CAPABILITIES)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-head-dim", type=int)
    parser.add_argument("--heads-per-kv-head", type=int, default=1)
    parser.add_argument("--pass", dest="names", nargs="+", choices=[*KERNELS], default=[*KERNELS])
    parser.add_argument(
        "--tile", type=int, nargs=4, metavar=("ROWS", "KEYS", "WARPS", "STAGES"), help="for all"
    )
    parser.add_argument("--described", action="store_true", help="that tile, loaded by descriptors")
    parser.add_argument("--ahead", action="store_true", help="dK, dV: a product begun early")
    args = parser.parse_args()
    args.v_head_dim = args.v_head_dim or args.head_dim
    sizes = (args.head_dim, args.v_head_dim)
    if not all(1 <= size <= 256 for size in sizes):
        parser.error("head sizes are 1 to 256")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    tiles = tiles_for(divmod(args.capability, 10), torch.bfloat16, *sizes)
    # Of contiguous tensors; the hardware reads whole 16 bytes.
    whole = all(size * 2 % 16 == 0 for size in sizes)
    passes = []
    for name in args.names:
        tile = getattr(tiles, name)
        if args.tile is not None:
            rows, keys, warps, stages = args.tile
            tile = KernelTile(rows, keys, warps, stages, args.described)
        else:
            args.ahead = tiles.ahead
        tile = tile._replace(described=tile.described and whole)
        passes.append(report(name, tile, tiles.block, args))
    print(json.dumps({"triton": triton.__version__, "passes": passes}, indent=1))


if __name__ == "__main__":
    main()
