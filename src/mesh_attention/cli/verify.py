"""`mesh-attention verify`: proves a plan, made here or read from its text form."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from mesh_attention.cli.command import Command, Flag, UsageError, flags_beside
from mesh_attention.cli.options import add_plan_flags, directions_of, plan_of
from mesh_attention.cli.output import progress, show
from mesh_attention.errors import PlanTextError
from mesh_attention.files import read_text
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.text import HEADER, digest, parse_plan
from mesh_attention.plan.read.verify import Finding, verify

MOST_BYTES = 1 << 30  # the text of a mesh of 1,024 ranks has 40 MB


def run(args: argparse.Namespace) -> int:
    plan = plan_of(args) if args.text is None else _read(args)
    with progress("verifying") as tell:
        findings = verify(plan, progress=tell)
    return show(
        args,
        lambda: {
            "ok": not findings,
            "digest": digest(plan),
            "problems": [finding.to_json() for finding in findings],
        },
        lambda: _to_lines(plan, findings),
        ok=not findings,
    )


def _to_lines(plan: Plan, findings: Sequence[Finding]) -> list[str]:
    if findings:
        return [*map(str, findings), f"bad: {len(findings)} problems found"]
    operations = sum(len(p.operations) for pass_ in plan.passes for p in pass_.programs)
    passes = " and ".join(str(pass_.direction) for pass_ in plan.passes)
    return [
        f"ok: {plan.method} on {plan.num_ranks} ranks, {passes}: every visible pair is "
        f"computed once and reduced to its owner once, and no rank deadlocks "
        f"({operations} operations, digest {digest(plan)[:12]})"
    ]


def _read(args: argparse.Namespace) -> Plan:
    """The plan of `--text`, with the passes of `--pass`."""
    if flags := flags_beside(args, "--text", "--pass"):
        raise UsageError(f"--text gives the whole plan; leave out {', '.join(flags)}")
    if args.text == "-":
        text = sys.stdin.read(len(HEADER))  # an input that is no plan may have no end
        text += sys.stdin.read(MOST_BYTES) if text == HEADER else ""
    else:
        text = read_text(args.text, most_bytes=MOST_BYTES)
    try:
        plan = parse_plan(text)
    except PlanTextError as error:
        raise UsageError(f"{args.text} is not the text form of a plan: {error}") from error
    directions = directions_of(args)
    passes = tuple(pass_ for pass_ in plan.passes if pass_.direction in directions)
    if not passes:
        raise UsageError(f"{args.text} holds no {args.passes or ''} pass to verify")
    return dataclasses.replace(plan, passes=passes)


COMMAND = Command(
    summary="prove a plan by running all ranks on symbols; exit code 1 when it is wrong",
    run=run,
    flags=(
        Flag("--text", "verify the plan in FILE (- is stdin) instead of making one", str, "FILE"),
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention verify --ranks 64 --causal --chunks 4x4",
        "mesh-attention plan --text - | mesh-attention verify --text -",
    ),
)
