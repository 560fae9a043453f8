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

Repeat it with `make compare`: in minutes on a GPU, otherwise over gloo in float32. There flash
kernels are missing, and the rings of the two libraries give wrong results (they add up in views of
buffers that bfloat16 would copy).
"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    files = sorted(RESULTS.glob("*-peer-libraries-h200*.json"))
    results = [json.loads(file.read_text()) for file in files]
    results.sort(key=lambda result: str(result["date"]))  # of a cell that ran twice the newest
    cells = {_key(cell): cell for result in results for cell in result["cells"]}
    timed = [cell for cell in cells.values() if "contestants" in cell]
    parts = [INTRODUCTION]
    for sizes in dict.fromkeys(_sizes(cell) for cell in timed):
        parts.append(f"## {sizes}\n\n" + "\n".join(_table(timed, sizes)) + "\n")
    machines = dict.fromkeys(
        f"{result['device']}, {result['machine']}, {result['date'][:10]}" for result in results
    )
    parts.append(
        "A dash: not run. Window: an eighth of the tokens. Packed: four documents. Medians "
        "of rounds; each round, bytes, errors and settings are in "
        f"{', '.join(f'`benchmarks/results/{file.name}`' for file in files)}.\n\n"
        f"Machine: {'; '.join(machines)}. Written by `python docs/make_peers.py`.\n"
    )
    return "\n".join(parts)


def _key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return (cell["ranks"], cell["mask"], _sizes(cell), "contestants" in cell)


def _sizes(cell: Mapping[str, Any]) -> str:
    heads = f"{cell['heads']} heads of {cell['dim']}, {cell['kv_heads']} KV heads"
    return f"{cell['tokens'] // 1024}K tokens, {heads}, bfloat16"


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
