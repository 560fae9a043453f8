"""What our Triton attention kernels are compiled to for a GPU that need not be there.

    python benchmarks/triton_code.py --capability 90 --head-dim 128

For each pass, with the tile of the table or those given: registers, what does not fit into them,
shared memory, and of each inner loop (on Hopper whole blocks, then masked ones) its instructions,
matrix products, reloads of spilled registers, and copies from memory by their width (none where the
hardware's own unit loads whole tiles). Numbers of rows that are copied by four bytes, or under a
mask, slow a loop down by a fifth, which no test of results sees.
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
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped,unused-ignore]

from mesh_attention.cli.output import table
from mesh_attention.kernels.fused.attention_backward import attention_backward_queries_kernel
from mesh_attention.kernels.fused.attention_backward_keys import attention_backward_keys_kernel
from mesh_attention.kernels.fused.attention_forward import attention_forward_kernel
from mesh_attention.kernels.launches import KernelTile, padded
from mesh_attention.kernels.triton_ranges import KernelTiles, tiles_for

KERNELS = {
    "forward": attention_forward_kernel,
    "backward_queries": attention_backward_queries_kernel,
    "backward_keys": attention_backward_keys_kernel,
}
CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)
STATISTICS = ("lse", "delta", "statistics")
LISTS = ("lo", "hi", "key_position", "runs", "table")
TOKENS = ("q", "k", "v", "grad_out", "out", "dq", "dk", "dv")
TYPES = (
    dict.fromkeys(TOKENS, "*bf16")
    | dict.fromkeys(STATISTICS, "*fp32")
    | dict.fromkeys(LISTS, "*i32")
    | dict.fromkeys(("scale", "inner_scale", "softmax_scale"), "fp32")
)


_COPY = re.compile(r"LDGSTS(?:\.[A-Z]+)*(?:\.(64|128))?\b")


def _is_possible(tile: KernelTile, block: int) -> bool:
    sizes = [16 << i for i in range(8) if 16 << i <= block]
    return (
        tile.rows in sizes and tile.keys in sizes and tile.warps in (4, 8) and 0 < tile.stages <= 8
    )


def compiled(name: str, tile: KernelTile, block: int, given: argparse.Namespace) -> Any:
    """For bf16, one interval a query, and tensors whose strides are multiples of 16."""
    kernel = KERNELS[name]
    D, E = given.head_dim, given.v_head_dim
    constants = {
        "REPEATS": given.heads_per_kv_head,
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
        "AHEAD": tile.ahead,
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
        target=GPUTarget("cuda", given.capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )


def machine_code(found: Any) -> tuple[str, str]:
    """(resource usage, assembly), by the tools that come with Triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
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
    found = []
    for at, line in enumerate(lines):
        back = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if back and labels.get(back[1], at) < at:
            found.append(range(labels[back[1]], at + 1))
    found = [one for one in found if any("MMA" in lines[at] for at in one)]
    # What waits for a copy stands behind all loops, and jumps back into the middle of one.
    inner = [
        one
        for one in found
        if not any(one.start <= x.start and x.stop <= one.stop for x in found if x != one)
    ]
    return [[lines[at] for at in one if ";" in lines[at]] for one in inner]


def masked_loads(ir: str) -> list[str]:
    """Loads of single numbers of rows, under a mask, in the loops of Triton's own code."""
    depth, found = 0, []
    for line in ir.splitlines():
        if "scf.for" in line or "scf.while" in line:
            depth += 1
        elif depth and re.match(r"\s*}", line):
            depth -= 1
        load = re.search(r"tt\.load ([^:{]*).* : tensor<(\d+)x!tt\.ptr", line)
        if depth and load and "," in load[1]:
            found.append(line.strip())
    return found


def report(name: str, tile: KernelTile, block: int, given: argparse.Namespace) -> dict[str, Any]:
    try:
        made = compiled(name, tile, block, given)
    except Exception as error:  # Triton's errors have no common kind
        raise SystemExit(f"{name}, tile {tuple(tile)}: {type(error).__name__}: {error}") from None
    usage, code = machine_code(made)
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
        "shared_bytes": made.metadata.shared,
        "masked_loads_in_loops": masked_loads(made.asm["ttir"]),
        "loops": rows,
    }


def asked() -> tuple[argparse.Namespace, KernelTiles, KernelTile | None]:
    """What was asked for, the tiles of the table, and one in place of all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90, help="80, 90, 100, ...")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-head-dim", type=int)
    parser.add_argument("--heads-per-kv-head", type=int, default=1)
    parser.add_argument("--pass", dest="names", nargs="+", choices=[*KERNELS], default=[*KERNELS])
    parser.add_argument(
        "--tile", type=int, nargs=4, metavar=("ROWS", "KEYS", "WARPS", "STAGES"), help="for all"
    )
    parser.add_argument("--described", action="store_true", help="that tile, loaded by descriptors")
    parser.add_argument("--ahead", action="store_true", help="with the next product begun early")
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args()
    if given.v_head_dim is None:
        given.v_head_dim = given.head_dim
    D, E = given.head_dim, given.v_head_dim
    if given.capability not in CAPABILITIES:
        known = ", ".join(map(str, CAPABILITIES))
        parser.error(f"--capability {given.capability}: the kernels are for {known}")
    if not all(1 <= size <= 256 for size in (D, E)):
        parser.error("head sizes are 1 to 256")
    if given.heads_per_kv_head < 1:
        parser.error("--heads-per-kv-head is 1 or more")
    tiles = tiles_for(divmod(given.capability, 10), torch.bfloat16, D, E)
    flags = (given.described, given.ahead)
    if given.tile is None and any(flags):
        parser.error("--described and --ahead are of a --tile")
    own = None
    if given.tile is not None:
        rows, keys, warps, stages = given.tile
        own = KernelTile(rows, keys, warps, stages, *flags)
    if own is not None and not _is_possible(own, tiles.block):
        parser.error(
            f"--tile: rows and keys are powers of two from 16 to {tiles.block}, warps 4 or 8, "
            "stages 1 to 8"
        )
    return given, tiles, own


def main() -> None:
    given, tiles, own = asked()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    # Of contiguous tensors; the hardware reads whole 16 bytes.
    whole = all(size * 2 % 16 == 0 for size in (given.head_dim, given.v_head_dim))
    found = []
    for name in given.names:
        tile = own or getattr(tiles, name)
        tile = tile._replace(described=tile.described and whole)
        found.append(report(name, tile, tiles.block, given))
    if given.json:
        print(json.dumps({"triton": triton.__version__, "passes": found}, indent=1))
        return
    print(f"Triton {triton.__version__}, compute capability {given.capability / 10}, bf16")
    columns = ["pass", "tile", "registers", "stack", "shared", "loop", "instructions", "spills"]
    lines = [[*columns, "copies"]]
    for one in found:
        for at, loop in enumerate(one["loops"]):
            *numbers, described, ahead = one["tile"]
            tile = "x".join(map(str, numbers)) + " described" * described + " ahead" * ahead
            first = [one["pass"], tile, str(one["registers"])]
            copies = [f"{n} of {width} bytes" for width, n in loop["copies_by_bytes"].items()]
            lines.append(
                [
                    *(first if at == 0 else [""] * 3),
                    "" if at else f"{one['stack_bytes']} bytes",
                    "" if at else f"{one['shared_bytes'] / 1024:.0f} KiB",
                    ("whole", "masked")[at] if len(one["loops"]) == 2 else str(at),
                    f"{loop['instructions']} ({loop['products']} products)",
                    f"{loop['spill_stores']} stored, {loop['spill_loads']} loaded",
                    ", ".join(copies),
                ]
            )
    print(table(lines))
    for one in found:
        for line in one["masked_loads_in_loops"]:
            print(f"{one['pass']}: numbers of rows are loaded under a mask: {line}")


if __name__ == "__main__":
    main()
