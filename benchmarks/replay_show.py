"""Prints the tables of `replay_tables.py`: results beside bounds, predictions, goals and peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mode
from typing import Any

__all__ = ["show"]

Row = dict[str, Any]

# MagiAttention's benchmark on H100, TFLOP/s a GPU (read off its charts): 8K tokens a GPU, heads
# 64:8, causal, on 8, 16, 32, 64 GPUs.
PUBLISHED = {
    "forward": {
        "MagiAttention": (645, 648, 621, 594),
        "USP": (592, 588, 594, 587),
        "Ulysses": (601, 557, 580, 586),
        "ring p2p": (421, 455, 450, 446),
    },
    "backward": {
        "Ulysses": (583, 560, 573, 585),
        "USP": (571, 569, 574, 571),
        "MagiAttention": (529, 530, 540, 528),
        "ring p2p": (433, 474, 469, 457),
    },
}
GROUPED_RANKS = (8, 16, 32, 64)
MFU_GOALS = {
    ("forward", False): 57.0,
    ("forward", True): 58.0,
    ("backward", False): 50.0,
    ("backward", True): 50.0,
}
SPEED_GOALS = {"usp": 1.8, "ring": 9.0}
MEMORY_GOALS_GIB = {"forward": 2.4, "backward": 5.0}
LEAN_TIME = 1.05


def show(report: dict[str, Any]) -> None:
    rows: list[Row] = [_renamed(row) for row in report["rows"] if row["high_priority"]]
    usual = mode([row["sms"] for row in rows]) if rows else 0
    rows = [row for row in rows if row["sms"] == usual]
    print(f"\n{report['what']}; {report['machine']}, {report['date']}, commit {report['commit']}")
    for cluster in dict.fromkeys(row["cluster"] for row in rows):
        here = [row for row in rows if row["cluster"] == cluster]
        _settings(cluster, [row for row in here if row["table"] == "settings"])
        _methods(cluster, here)
        _tuned(cluster, here)
        _memory(cluster, here)
    _grouped([row for row in rows if row["table"] == "grouped"])
    for table, what in (
        ("auto", "the best of all methods, and the least bytes"),
        ("default", "the default"),
    ):
        _auto([row for row in rows if row["table"] == table], what)
    for name, why in report["failed"].items():
        print(f"left out: {name}: {why}")


def _auto(rows: Sequence[Row], what: str) -> None:
    if not rows:
        return
    print(f"\n{what}: ms (MFU %), alone, simulated")
    lines = [["cluster", "ranks", "tokens", "heads", "mask", "pass", "asked for", "chosen"]]
    lines[0] += ["ms", "alone", "simulated", "goal"]
    for r in rows:
        asked = ["auto" if "-auto-" in r["name"] else r["method"]]
        asked += [f"{k} {v}" for k, v in r["options"].items()]
        setting = dict(r["setting"])
        words = [setting.pop("method", r["method"])]
        words += [f"{k} {v}" for k, v in setting.items() if k in CHOSEN and v not in ("1", "None")]
        grouped = r["kv_heads"] != 64
        rate = r["mfu_percent"] / 100 * PEAK_TFLOPS if grouped else r["mfu_percent"]
        goal = GROUPED_GOALS[r["direction"]] if grouped else _auto_goal(r)
        lines.append(
            [
                *(r["cluster"], str(r["ranks"]), f"{r['tokens'] // 1024}K", f"64:{r['kv_heads']}"),
                *("causal" if r["causal"] else "full", r["direction"]),
                *(" ".join(asked), " ".join(words)),
                f"{_ms(r)} ({r['mfu_percent']:.1f})",
                f"{r['compute_seconds'] * 1e3:.1f} ({r['compute_mfu_percent']:.1f})",
                f"{r['predicted_seconds'] * 1e3:.1f} ({r['predicted_mfu_percent']:.1f})",
                f"{rate:.1f} of {_verdict(rate >= goal, f'{goal:g}')}",
            ]
        )
    _print(lines)


def _auto_goal(row: Row) -> float:
    key = (row["direction"], row["causal"])
    if row["cluster"] == "paper":
        return PAPER_GOALS[key]
    return AUTO_GOALS[key] + (MORE_BYTES[key] if "-auto-" in row["name"] else 0.0)


CHOSEN = (
    *("tile", "ulysses", "units_per_node", "team", "ring", "head_slices", "chunks"),
    *("even_chunks", "short_start", "combine", "layout"),
)
PEAK_TFLOPS = 989.0  # dense bf16 of an H100 and of an H200
# With at most 14 units in any pass; more where bytes are free.
AUTO_GOALS = {
    ("forward", False): 65.0,
    ("forward", True): 61.0,
    ("backward", False): 56.0,
    ("backward", True): 55.0,
}
MORE_BYTES = dict.fromkeys(AUTO_GOALS, 1.0) | {
    ("forward", False): 2.0,
    ("forward", True): 2.0,
}
PAPER_GOALS = {key: goal - 1.0 for key, goal in AUTO_GOALS.items()} | {("forward", False): 65.0}
GROUPED_GOALS = {"forward": 660.0, "backward": 560.0}  # TFLOP/s


def _renamed(row: Row) -> Row:
    """Results that were stored before 0.2 call head slices heads at once."""
    options = dict(row["options"])
    if "heads_at_once" in options:
        options["head_slices"] = options.pop("heads_at_once")
    return row | {"options": options}


def _settings(cluster: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    print(
        f"\n{cluster}: milliseconds (MFU %), compute alone, simulated, and times slower than mesh"
    )
    lines = [["ranks", "tokens", "mask", "pass", "mesh", "alone", "simulated", "goal"]]
    lines[0] += [f"{name} {part}" for name in SPEED_GOALS for part in ("ms", "/ mesh", "goal")]
    for at in _distinct(rows, "ranks", "tokens", "causal", "direction"):
        there = {r["method"]: r for r in rows if _place(r) == at}
        mesh = there.get("mesh")
        if mesh is None:
            continue
        line = _where(mesh)
        line += [
            f"{_ms(mesh)} ({mesh['mfu_percent']:.1f})",
            f"{mesh['compute_seconds'] * 1e3:.1f} ({mesh['compute_mfu_percent']:.1f})",
            f"{mesh['predicted_seconds'] * 1e3:.1f} ({mesh['predicted_mfu_percent']:.1f})",
            _mfu_goal(mesh),
        ]
        for name, goal in SPEED_GOALS.items():
            other = there.get(name)
            if other is None:
                line += ["-", "-", "-"]
                continue
            ratio = other["seconds"] / mesh["seconds"]
            wanted = _verdict(ratio >= goal, f"{goal:g}") if cluster == "paper" else ""
            line += [_ms(other), f"{ratio:.2f}", wanted]
        lines.append(line)
    _print(lines)


def _methods(cluster: str, rows: Sequence[Row]) -> None:
    at = [
        r
        for r in rows
        if (r["ranks"], r["tokens"]) == (256, 524288) and r["table"] in ("settings", "methods")
    ]
    if not any(r["table"] == "methods" for r in at):
        return
    print(f"\n{cluster}, 256 ranks, 512K tokens: milliseconds (MFU %) and peak GiB of every method")
    kinds = [(causal, d) for causal in (False, True) for d in ("forward", "backward")]
    lines = [["method", *(f"{'causal' if causal else 'full'} {d}" for causal, d in kinds)]]
    for method in dict.fromkeys(r["method"] for r in at):
        # A setting that was found stands here, not one that was given.
        own = sorted(
            (r for r in at if r["method"] == method), key=lambda r: r["table"] == "methods"
        )
        found = {(r["causal"], r["direction"]): r for r in own}
        cells = []
        for kind in kinds:
            r = found.get(kind)
            gib = r["peak_bytes"] / 2**30 if r else 0.0
            cells.append(f"{_ms(r)} ({r['mfu_percent']:.1f}) {gib:.2f}" if r else "-")
        lines.append([method, *cells])
    _print(lines)


def _tuned(cluster: str, rows: Sequence[Row]) -> None:
    tuned = [r for r in rows if r["table"] == "tuned"]
    if not tuned:
        return
    print(f"\n{cluster}, 256 ranks, 512K tokens: mesh at other settings, ms (MFU %)")
    heads = sorted({r["options"]["head_slices"] for r in tuned})
    lines = [["mask", "pass", "tile", *heads]]
    found = [["mask", "pass", "searched", "fastest of all", "goal"]]
    for at in _distinct(tuned, "causal", "direction"):
        here = [r for r in tuned if (r["causal"], r["direction"]) == at]
        name = ["causal" if at[0] else "full", str(at[1])]
        for tile in dict.fromkeys(r["setting"]["tile"] for r in here):
            cells = {r["options"]["head_slices"]: r for r in here if r["setting"]["tile"] == tile}
            lines.append([*name, tile, *(_time(cells.get(h)) for h in heads)])
        searched = [
            r
            for r in rows
            if (r["table"], r["method"], *_place(r)) == ("settings", "mesh", 256, 524288, *at)
        ]
        fastest = min(searched + here, key=lambda r: float(r["seconds"]))
        best = _time(searched[0] if searched else None)
        found.append([*name, best, _time(fastest), _mfu_goal(fastest)])
    _print(lines)
    _print(found)


def _time(row: Row | None) -> str:
    return f"{_ms(row)} ({row['mfu_percent']:.1f})" if row else "-"


def _memory(cluster: str, rows: Sequence[Row]) -> None:
    lean = [r for r in rows if r["table"] == "memory"]
    if not lean:
        return
    print(f"\n{cluster}, 256 ranks, 512K tokens, no mask: memory against time")
    lines = [["pass", "slices", "peak GiB", "of the best", "by the plan", "ms", "times slower"]]
    for direction in ("forward", "backward"):
        best = [
            r
            for r in rows
            if r["table"] == "settings"
            and (r["method"], r["ranks"], r["tokens"]) == ("mesh", 256, 524288)
            and (r["causal"], r["direction"]) == (False, direction)
        ]
        for r in best + [r for r in lean if r["direction"] == direction]:
            gib, planned = r["peak_bytes"] / 2**30, r["planned_bytes"] / 2**30
            line = [direction, r["setting"].get("head_slices", "one"), f"{gib:.2f}"]
            share = gib / (best[0]["peak_bytes"] / 2**30) if best else 0.0
            slower = r["seconds"] / best[0]["seconds"] if best else 0.0
            line += [f"{share:.0%}", f"{planned:.2f}", _ms(r), f"{slower:.3f}"]
            if r["table"] == "settings":
                goal = MEMORY_GOALS_GIB[direction]
                line[2] += " " + _verdict(gib <= goal, f"{goal:g}")
            elif share <= 0.5 and slower <= LEAN_TIME:
                line[-1] += " reached"
            lines.append(line)
    _print(lines)


def _grouped(rows: Sequence[Row]) -> None:
    if not rows:
        return
    for direction in ("forward", "backward"):
        print(f"\nhgx-h100, 8K tokens a GPU, heads 64:8, causal {direction}: TFLOP/s a GPU")
        lines = [["", *(f"{ranks} GPUs" for ranks in GROUPED_RANKS)]]
        here = [r for r in rows if r["direction"] == direction]
        for method in dict.fromkeys(r["method"] for r in here):
            for what in ("replayed", "alone"):
                cells = []
                for ranks in GROUPED_RANKS:
                    found = [r for r in here if (r["method"], r["ranks"]) == (method, ranks)]
                    key = "mfu_percent" if what == "replayed" else "compute_mfu_percent"
                    cells.append(f"{_tflops(found[0], key):.0f}" if found else "-")
                lines.append([f"{method}, {what}", *cells])
        for name, figures in PUBLISHED[direction].items():
            lines.append([f"published: {name}", *map(str, figures)])
        _print(lines)


def _tflops(row: Row, key: str) -> float:
    return float(row[key]) / 100 * float(row["peak_tflops"])


def _mfu_goal(row: Row) -> str:
    if (row["ranks"], row["tokens"]) != (256, 524288):
        return ""
    goal = MFU_GOALS[row["direction"], row["causal"]]
    return _verdict(row["mfu_percent"] >= goal, f"{goal:g} %")


def _verdict(reached: bool, goal: str) -> str:
    return f"{goal} {'reached' if reached else 'MISSED'}"


def _ms(row: Row) -> str:
    return f"{row['seconds'] * 1e3:.1f}"


def _where(row: Row) -> list[str]:
    mask = "causal" if row["causal"] else "full"
    return [str(row["ranks"]), f"{row['tokens'] // 1024}K", mask, row["direction"]]


def _place(row: Row) -> tuple[object, ...]:
    return row["ranks"], row["tokens"], row["causal"], row["direction"]


def _distinct(rows: Iterable[Row], *names: str) -> list[tuple[object, ...]]:
    """In order of size, forward before backward; the direction is the last of the names."""
    found = {tuple(row[name] for name in names) for row in rows}
    return sorted(found, key=lambda at: (*at[:-1], at[-1] != "forward"))


def _print(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
