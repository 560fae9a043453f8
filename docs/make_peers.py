"""Writes docs/peers.md: the tables of `benchmarks/against_peers.py`, from its committed results.

python docs/make_peers.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("peers.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
NAMES = {
    "torch-allgather": "torch, all-gather",
    "torch-alltoall": "torch, all-to-all",
    "hand-ulysses": "Ulysses by hand",
    "ring-flash-attn": "ring-flash-attn",
    "ring-flash-attn-llama3": "its llama3",
    "yunchang-ulysses": "yunchang Ulysses",
    "yunchang-usp": "yunchang USP",
    "default": "**ours**",
}
MASKS = ("causal", "full", "window", "packed")

INTRODUCTION = """# Beside its peers

This page answers: how the default compares with PyTorch, Ulysses by hand, ring-flash-attention and
yunchang, what each refuses, and how to repeat it.

Milliseconds of one attention, forward and backward; less is better. **All ranks share one GPU**
(NCCL over sockets, MPS): transfers are slow and kernels share the device. The table shows what each
library computes, sends and refuses, not its speed on several GPUs, which was not measured. Our
times include the comparison of calls ([guarantees](guarantees.md)), milliseconds here.

| column | what it is |
|---|---|
| torch | PyTorch's `context_parallel`, with both rotations |
| Ulysses by hand | all-to-all, SDPA, all-to-all in 15 lines; DeepSpeed's Ulysses sends the same |
| llama3 | the second algorithm of ring-flash-attention |
| yunchang USP | Ulysses on half of the ranks |
| ours | the default of `ContextParallel`, with a cluster file profiled on these ranks |

All take turns in one run on the same tensors. Each is compared with one device first, and a wrong
result is not timed. ring-flash-attention and yunchang use PyTorch's flash kernels through a shim
(`benchmarks/flash_attn_shim.py`), because flash-attn could not be installed; with flash-attn 3 they
would be faster. TransformerEngine, Megatron and MagiAttention were not run.

Repeat it with `make compare`: in minutes on a GPU, otherwise over gloo in float32; as root over
shaped links with `make compare MBIT=200`.
"""

SHAPED = """## Over links of {links}

Processes on one computer, each in a network namespace of its own, float32. The network is the
bottleneck here, as on a slow cluster, so times follow bytes and how well they are hidden. Flash
kernels are missing on CPUs. The rings of the two libraries give wrong results in float32, because
they add up in views of buffers that bfloat16 would copy.
"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    parts = [INTRODUCTION, *_tables("h200*", "##")]
    parts.append(SHAPED.format(links="200 Mbit/s a rank"))
    parts += _tables("shaped-links", "###")
    parts.append(
        "A dash: not run. Window: an eighth of the tokens. Packed: four documents. The files hold "
        "each round, forward and backward apart, bytes, errors and settings. "
        "Written by `python docs/make_peers.py`.\n"
    )
    return "\n".join(parts)


def _tables(which: str, heading: str) -> Iterator[str]:
    """A table for each size in the results of this name, then their files and machines."""
    files = sorted(RESULTS.glob(f"*-peer-libraries-{which}.json"))
    results = [json.loads(file.read_text()) for file in files]
    results.sort(key=lambda result: str(result["date"]))  # of a cell that ran twice the newest
    cells = {_key(cell): cell for result in results for cell in result["cells"]}
    timed = [cell for cell in cells.values() if "contestants" in cell]
    dtype = "float32" if which == "shaped-links" else "bfloat16"
    for sizes in dict.fromkeys(_sizes(cell) for cell in timed):
        yield f"{heading} {sizes}, {dtype}\n\n" + "\n".join(_table(timed, sizes)) + "\n"
    machines = dict.fromkeys(
        f"{result['device']}, {result['machine']}, {result['date'][:10]}" for result in results
    )
    names = ", ".join(f"`benchmarks/results/{file.name}`" for file in files)
    yield f"Machine: {'; '.join(machines)}. Results: {names}.\n"


def _key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return (cell["ranks"], cell["mask"], _sizes(cell), "contestants" in cell)


def _sizes(cell: Mapping[str, Any]) -> str:
    heads = f"{cell['heads']} heads of {cell['dim']}, {cell['kv_heads']} KV heads"
    return f"{cell['tokens'] // 1024}K tokens, {heads}"


def _table(cells: list[dict[str, Any]], sizes: str) -> Iterator[str]:
    of_sizes = [cell for cell in cells if _sizes(cell) == sizes]
    by_row = {(cell["ranks"], cell["mask"]): cell["contestants"] for cell in of_sizes}
    yield "| ranks, mask | " + " | ".join(NAMES.values()) + " |"
    yield "|---" * (len(NAMES) + 1) + "|"
    for ranks, mask in sorted(by_row, key=lambda x: (x[0], MASKS.index(x[1]))):
        contestants = by_row[ranks, mask]
        best = min(x["both_ms"] for x in contestants.values() if "both_ms" in x)
        times = [_cell(_row(contestants, name), best) for name in NAMES]
        yield f"| {ranks}, {mask} | " + " | ".join(times) + " |"


def _row(contestants: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    row: Mapping[str, Any] = contestants.get(name, {})
    return contestants[row["same_as"]] if "same_as" in row else row


def _cell(row: Mapping[str, Any], best: float) -> str:
    if "both_ms" in row:
        text = f"{row['both_ms']:.0f}"
        return f"**{text}**" if row["both_ms"] == best else text
    reason = row.get("refused", "")
    if not reason or "another method" in reason:
        return "-"
    return "wrong" if "wrong" in reason else "refused"


if __name__ == "__main__":
    main()
