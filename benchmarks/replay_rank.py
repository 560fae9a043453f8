"""One rank of a plan on the GPU at hand, with a modelled network (docs/replay.md).

    python benchmarks/replay_rank.py --cluster paper --ranks 256 --tokens 524288 --heads 64 --best

Communications are replaced by stand-ins that last as long as the cluster model says.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence

from replay.rank import SLOWEST, RankToReplay, Replayed, rank_to_replay

from mesh_attention.cli.command import Command, Flag, exit_code, run_command
from mesh_attention.cli.options import add_plan_flags
from mesh_attention.cli.output import show, table
from mesh_attention.cli.simulate import CLUSTER_FLAGS, Simulated, simulated
from mesh_attention.cli.values import count, size
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import problem_text

PROGRAM = "python benchmarks/replay_rank.py"
DEFAULT_SMS = 16  # NCCL's rings take one for each of their 16 to 24 channels
DEFAULT_REPEATS = 5


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(PROGRAM, lambda: run_command(PROGRAM, COMMAND, words))


def run(args: argparse.Namespace) -> int:
    from replay.measure import check_device, measure, with_kernels_here

    check_device(args.sms)  # before minutes of planning
    cluster = with_kernels_here(load_cluster(args.cluster))
    ranks = [_to_replay(one, args.rank) for one in simulated(args, cluster)]
    found = [
        measure(
            given,
            sms=args.sms,
            repeats=args.repeats,
            high_priority=not args.same_priority,
            kernel=args.kernel,
        )
        for given in ranks
    ]
    by_pass = {one.given.one.direction.value: one.to_json() for one in found}
    return show(
        args,
        lambda: by_pass if len(by_pass) > 1 else found[0].to_json(),
        lambda: _for_people(found),
    )


def _to_replay(one: Simulated, rank: int | str) -> RankToReplay:
    given = rank_to_replay(one.timeline, rank)
    given.predicted["setting"] = one.setting
    return given


def _for_people(found: Sequence[Replayed]) -> str:
    first = found[0]
    given = first.given
    numbers = [one.to_json() for one in found]

    def milliseconds(name: str) -> list[str]:
        return [f"{n[name] * 1e3:.2f} ms" for n in numbers]

    rows = [
        ["", *(n["direction"] for n in numbers)],
        ["rank", *(str(n["rank"]) for n in numbers)],
        ["time", *milliseconds("seconds")],
        ["  bound: compute alone", *milliseconds("compute_seconds")],
        ["  predicted by simulate", *milliseconds("predicted_seconds")],
        ["exposed communication", *map(_exposed, found)],
        ["  predicted by simulate", *milliseconds("predicted_exposed_seconds")],
        ["MFU", *(f"{one.mfu_percent:.1f} %" for one in found)],
        ["  bound: compute alone", *(f"{one.compute_mfu_percent:.1f} %" for one in found)],
        ["  predicted by simulate", *(f"{n['predicted_mfu_percent']:.1f} %" for n in numbers)],
        ["peak memory", *(bytes_text(one.peak_bytes) for one in found)],
        ["  by the plan", *(bytes_text(one.planned_bytes) for one in found)],
    ]
    lines = [
        f"{given.plan.method} on {given.plan.num_ranks} ranks of {numbers[0]['cluster']}, "
        f"one of them replayed on {first.machine}",
        problem_text(given.plan.problem),
        table(rows),
    ]
    for one, number in zip(found, numbers, strict=True):
        words = ", ".join(f"{key} {value}" for key, value in number["setting"].items())
        lines.append(f"{number['direction']}: {words}; kernels {', '.join(one.kernels)}")
    takes = f"take {first.sms} SMs" if first.sms else "take no SM but one warp, as copy engines do"
    lines += [
        f"Compute measured, network modelled: communications {takes} and last as simulated.",
        f"Time: median of {len(first.all_seconds)}; "
        f"MFU of {given.peak_tflops:g} TFLOP/s by mask area. Peak memory "
        "holds shards, results, workspace, kernel results and some MiB of the stand-ins.",
    ]
    return "\n".join(lines)


def _exposed(one: Replayed) -> str:
    return f"{one.exposed_seconds * 1e3:.2f} ms ({one.exposed_seconds / one.seconds:.0%})"


def _rank(text: str) -> int | str:
    if text == SLOWEST:
        return text
    if not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is neither the number of a rank nor {SLOWEST}")
    return count(text)


COMMAND = Command(
    name="replay",
    summary="run one rank of a plan on this GPU, with the network of a cluster modelled",
    run=run,
    flags=(
        *CLUSTER_FLAGS,
        Flag(
            "--rank",
            "whose program (default: of the rank that is predicted to end last)",
            *(_rank, f"R|{SLOWEST}", SLOWEST),
        ),
        Flag(
            "--sms",
            f"SMs that a communication takes (default {DEFAULT_SMS}, as NCCL); 0: copy engines",
            *(count, "N", DEFAULT_SMS),
        ),
        Flag("--same-priority", "communication on a stream of ordinary priority (default: high)"),
        Flag(
            "--repeats",
            f"timed runs, of which the median counts (default {DEFAULT_REPEATS})",
            *(size, "N", DEFAULT_REPEATS),
        ),
    ),
    more_flags=add_plan_flags,
    examples=(
        f"{PROGRAM} --cluster paper --ranks 256 --tokens 524288 --heads 64 --best",
        f"{PROGRAM} --cluster hgx-h100 --method usp --ulysses 8 --ranks 64 "
        "--tokens 262144 --causal --pass forward --rank 0 --sms 24 --json",
    ),
)

if __name__ == "__main__":
    sys.exit(main())
