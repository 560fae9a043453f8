"""`mesh-attention verify`: prove a plan, made here or read from its text form."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from mesh_attention.cli.command import Command, Flag, UsageError
from mesh_attention.cli.options import add_plan_flags, directions_of, given, plan_of
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
    show(
        args,
        lambda: {
            "ok": not findings,
            "digest": digest(plan),
            "problems": [found.to_json() for found in findings],
        },
        lambda: _for_people(plan, findings),
    )
    return 1 if findings else 0


def _for_people(plan: Plan, findings: Sequence[Finding]) -> str:
    if findings:
        return "\n".join([*map(str, findings), f"bad: {len(findings)} problems found"])
    operations = sum(len(p.operations) for one in plan.passes for p in one.programs)
    passes = " and ".join(str(one.direction) for one in plan.passes)
    return (
        f"ok: {plan.method} on {plan.num_ranks} ranks, {passes}: every visible pair is "
        f"computed once and reduced to its owner once, and no rank deadlocks "
        f"({operations} operations, digest {digest(plan)[:12]})"
    )


def _text(source: str) -> str:
    if source != "-":
        return read_text(source, most_bytes=MOST_BYTES)
    begin = sys.stdin.read(len(HEADER))  # what is no plan may have no end
    return begin + sys.stdin.read(MOST_BYTES) if begin == HEADER else begin


def _read(args: argparse.Namespace) -> Plan:
    options = given(args)
    if options:
        raise UsageError(f"--text gives the whole plan; leave out {', '.join(options)}")
    try:
        plan = parse_plan(_text(args.text))
    except PlanTextError as error:
        raise UsageError(f"{args.text} is not the text form of a plan: {error}") from error
    if args.passes is None:
        wanted = plan.passes
    else:
        directions = directions_of(args)
        wanted = tuple(one for one in plan.passes if one.direction in directions)
    if not wanted:
        raise UsageError(f"{args.text} holds no {args.passes or ''} pass to verify")
    return dataclasses.replace(plan, passes=wanted)


COMMAND = Command(
    name="verify",
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
