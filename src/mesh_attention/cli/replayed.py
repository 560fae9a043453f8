"""What `mesh-attention bench replay` says about what it measured."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_attention.cli.output import table
from mesh_attention.plan.draw import bytes_text
from mesh_attention.plan.draw.summary import problem_text
from mesh_attention.replay.result import Replayed

__all__ = ["for_people"]


def for_people(found: Sequence[Replayed]) -> str:
    first = found[0]
    share = first.share
    numbers = [one.to_json() for one in found]

    def row(title: str, *cells: str) -> list[str]:
        return [title, *cells]

    def milliseconds(name: str) -> list[str]:
        return [f"{n[name] * 1e3:.2f} ms" for n in numbers]

    rows = [
        row("", *(n["direction"] for n in numbers)),
        row("rank", *(str(n["rank"]) for n in numbers)),
        row("time", *milliseconds("seconds")),
        row("  bound: compute alone", *milliseconds("compute_seconds")),
        row("  predicted by simulate", *milliseconds("predicted_seconds")),
        row("exposed communication", *map(_exposed, found)),
        row("  predicted by simulate", *milliseconds("predicted_exposed_seconds")),
        row("MFU", *(f"{one.mfu_percent:.1f} %" for one in found)),
        row("  bound: compute alone", *(f"{one.compute_mfu_percent:.1f} %" for one in found)),
        row("  predicted by simulate", *(f"{n['predicted_mfu_percent']:.1f} %" for n in numbers)),
        row("peak memory", *(bytes_text(one.peak_bytes) for one in found)),
        row("  by the plan", *(bytes_text(one.planned_bytes) for one in found)),
    ]
    lines = [
        f"{share.plan.method} on {share.plan.num_ranks} ranks of {numbers[0]['cluster']}, "
        f"one of them replayed on {first.machine}",
        problem_text(share.plan.problem),
        table(rows),
    ]
    for one, number in zip(found, numbers, strict=True):
        words = ", ".join(f"{key} {value}" for key, value in number["setting"].items())
        lines.append(f"{number['direction']}: {words}; kernels {', '.join(one.kernels)}")
    takes = f"take {first.sms} SMs" if first.sms else "take no SM but one warp, as copy engines do"
    lines += [
        f"Compute measured, network modelled: communications {takes} and last as simulated.",
        "Time: median of "
        f"{len(first.all_seconds)}; MFU of {share.peak_tflops:g} TFLOP/s by mask area. Peak memory "
        "holds shards, results, workspace, kernel results and some MiB of the stand-ins.",
    ]
    return "\n".join(lines)


def _exposed(one: Replayed) -> str:
    return f"{one.exposed_seconds * 1e3:.2f} ms ({one.exposed_seconds / one.seconds:.0%})"
