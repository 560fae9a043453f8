"""One rank of a plan on the GPU at hand, with a modelled network (docs/replay.md).

    python benchmarks/replay_rank.py --cluster paper --ranks 256 --tokens 524288 --heads 64 --best

Communications are replaced by stand-ins that last as long as the cluster model says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from replay.rank import SLOWEST, Replayed, rank_to_replay

from mesh_attention.cli.command import Args, Command, run_command
from mesh_attention.cli.main import exit_code
from mesh_attention.cli.options import plan_flags
from mesh_attention.cli.output import show, table
from mesh_attention.cli.simulate import CLUSTER_FLAGS, simulated
from mesh_attention.cli.values import UsageError, count
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import problem_text

PROGRAM = "python benchmarks/replay_rank.py"
DEFAULT_SMS = 16  # NCCL's rings take one for each of their 16 to 24 channels
DEFAULT_REPEATS = 5


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(PROGRAM, lambda: run_command(PROGRAM, COMMAND, words))


def run(args: Args) -> int:
    from replay.measure import check_device, measure, with_kernels_here

    check_device(args.sms)  # before minutes of planning
    cluster = with_kernels_here(load_cluster(args.cluster))
    parts = []
    for simulation in simulated(args, cluster):
        part = rank_to_replay(simulation.timeline, args.rank)
        part.predicted["setting"] = simulation.setting
        parts.append(part)
    replays = [
        measure(
            part,
            sms=args.sms,
            repeats=args.repeats,
            high_priority=not args.same_priority,
            kernel=args.kernel,
        )
        for part in parts
    ]
    by_pass = {replay.part.pass_.direction.value: replay.to_json() for replay in replays}
    return show(
        args,
        lambda: by_pass if len(by_pass) > 1 else replays[0].to_json(),
        lambda: [_for_people(replays)],
    )


def _for_people(replays: Sequence[Replayed]) -> str:
    first = replays[0]
    part = first.part
    numbers = [replay.to_json() for replay in replays]

    def milliseconds(name: str) -> list[str]:
        return [f"{n[name] * 1e3:.2f} ms" for n in numbers]

    rows = [
        ["", *(n["direction"] for n in numbers)],
        ["rank", *(str(n["rank"]) for n in numbers)],
        ["time", *milliseconds("seconds")],
        ["  bound: compute alone", *milliseconds("compute_seconds")],
        ["  predicted by simulate", *milliseconds("predicted_seconds")],
        ["exposed communication", *map(_exposed, replays)],
        ["  predicted by simulate", *milliseconds("predicted_exposed_seconds")],
        ["MFU", *(f"{r.mfu_percent:.1f} %" for r in replays)],
        ["  bound: compute alone", *(f"{r.compute_mfu_percent:.1f} %" for r in replays)],
        ["  predicted by simulate", *(f"{n['predicted_mfu_percent']:.1f} %" for n in numbers)],
        ["peak memory", *(bytes_text(r.peak_bytes) for r in replays)],
        ["  by the plan", *(bytes_text(r.planned_bytes) for r in replays)],
    ]
    lines = [
        f"{part.plan.method} on {part.plan.num_ranks} ranks of {numbers[0]['cluster']}, "
        f"one of them replayed on {first.machine}",
        problem_text(part.plan.problem),
        table(rows),
    ]
    for number in numbers:
        words = ", ".join(f"{key} {value}" for key, value in number["setting"].items())
        lines.append(f"{number['direction']}: {words}; kernels {', '.join(number['kernels'])}")
    takes = f"take {first.sms} SMs" if first.sms else "take no SM but one warp, as copy engines do"
    lines += [
        f"Compute measured, network modelled: communications {takes} and last as simulated.",
        f"Time: median of {len(first.all_seconds)}; "
        f"MFU of {part.peak_tflops:g} TFLOP/s by mask area. Peak memory "
        "holds shards, results, workspace, kernel results and some MiB of the stand-ins.",
    ]
    return "\n".join(lines)


def _exposed(replay: Replayed) -> str:
    seconds = replay.exposed_seconds
    return f"{seconds * 1e3:.2f} ms ({seconds / replay.seconds:.0%})"


def _rank(text: str) -> int | str:
    if text == SLOWEST:
        return text
    if not text.isdigit():
        raise UsageError(f"{text!r} is neither the number of a rank nor {SLOWEST}")
    return count(text)


COMMAND = Command(
    run,
    f"""\
run one rank of a plan on this GPU, with the network of a cluster modelled

examples:
  {PROGRAM} --cluster paper --ranks 256 --tokens 524288 --heads 64 --best
  {PROGRAM} --cluster hgx-h100 --method usp --ulysses 8 --ranks 64
    --tokens 262144 --causal --pass forward --rank 0 --sms 24 --json

{CLUSTER_FLAGS}
--rank R|{SLOWEST}={SLOWEST}  whose program (default: of the rank that is predicted to end last)
--sms N={DEFAULT_SMS}  SMs that a communication takes (default {DEFAULT_SMS}, as NCCL); 0: copy
                  engines
--same-priority   communication on a stream of ordinary priority (default: high)
--repeats N={DEFAULT_REPEATS}  timed runs, of which the median counts (default {DEFAULT_REPEATS})
""",
    plan_flags,
    {"rank": _rank, "sms": count},
)

if __name__ == "__main__":
    sys.exit(main())
