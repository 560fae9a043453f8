"""What ranks compare before they run a plan: a few digests, each made from one rank's own program.

The handshake of `runtime/agreement/` sends them; no rank needs the programs of the others. Equal
questions have equal plans, so ranks first compare the question. A plan may also have been handed
over, searched, parsed, or made by another version. So the members of each group also compare the
order, the kinds and the sizes of the collectives in which they will meet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple

from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import AllToAll, Communication, SendRecv
from mesh_attention.plan.language.traffic import Flows, TrafficMeter
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

AS_MADE = "as made"  # in place of a digest: programs that follow from the question

_MODULUS = 1 << 64


def question_digest(plan: Plan) -> str:
    """A digest of what the plan answers and of what was chosen: all that is not in the programs."""
    asked = {
        "problem": _fields(plan.problem) | {"mask": _fields(plan.problem.mask)},
        "layouts": [layout.to_json() for layout in dict.fromkeys((plan.q_layout, plan.kv_layout))],
        "relayout": plan.relayout,
        "devices": plan.devices,
        "ranks_per_node": plan.ranks_per_node,
        "method": plan.method,
        "passes": [[pass_.direction, pass_.setting, pass_.groups] for pass_ in plan.passes],
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _fields(value: Problem | Mask) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


class Meetings(NamedTuple):
    """One rank's side of the collectives of one group.

    `order` is the same on all members. `balance` adds up to 0 over them (modulo 2^64) when every
    piece that a member sends is received by another.
    """

    order: str
    balance: int


def meetings(plan: Plan, rank: int) -> dict[str, Meetings]:
    """The meetings of one logical rank, by pass and group, such as "forward Q0"."""
    result: dict[str, Meetings] = {}
    for pass_ in plan.passes:
        program = pass_.programs[rank]
        meter = TrafficMeter(plan.problem, program.buffer_table())
        # Also groups in which this rank never communicates, because the others may.
        orders: dict[str, list[str]] = {n: [] for n, ranks in pass_.groups.items() if rank in ranks}
        balances: dict[str, int] = {}
        for op in program.operations:
            if not isinstance(op, Communication):
                continue
            flows = meter.flows(op)
            # Sizes of a collective are the same everywhere; those of transfers belong to pairs.
            paired = isinstance(op, AllToAll | SendRecv)
            size = "" if paired else str(flows.received[0][0])
            orders.setdefault(op.group, []).append(f"{type(op).__name__} {op.name} {size}")
            if paired:
                member = pass_.groups[op.group].index(rank)
                balances[op.group] = balances.get(op.group, 0) + _balance(op.name, member, flows)
        for group, lines in orders.items():
            order = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            result[f"{pass_.direction} {group}"] = Meetings(
                order, balances.get(group, 0) % _MODULUS
            )
    return result


def _balance(name: str, member: int, flows: Flows) -> int:
    sent = (_number(f"{name} {member} {other} {size}") for other, size in flows.sent.items())
    received = (
        _number(f"{name} {other} {member} {size}") for other, (size, _) in flows.received.items()
    )
    return sum(sent) - sum(received)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def disagreements(said: Mapping[int, Mapping[str, Meetings]]) -> dict[str, list[int]]:
    """Groups whose members do not fit together, each with the ranks that differ from most others,
    or with all its ranks where their sizes do not add up."""
    by_group: dict[str, dict[int, Meetings]] = {}
    for rank, groups in said.items():
        for group, meeting in groups.items():
            by_group.setdefault(group, {})[rank] = meeting
    odd: dict[str, list[int]] = {}
    for group, members in by_group.items():
        orders = [meeting.order for meeting in members.values()]
        usual = max(set(orders), key=lambda order: (orders.count(order), order))
        differ = [rank for rank, meeting in members.items() if meeting.order != usual]
        if not differ and sum(meeting.balance for meeting in members.values()) % _MODULUS:
            differ = sorted(members)
        if differ:
            odd[group] = differ
    return odd
