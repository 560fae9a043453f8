"""A plan on one screen: what it solves, what it chose, what it costs."""

from __future__ import annotations

import re

from mesh_attention.plan.language.computed_pairs import balance
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import problem_text
from mesh_attention.plan.read.count import PassCount, count


def draw_summary(plan: Plan) -> str:
    counts = count(plan)
    rows = [
        ("plan", f"{plan.method} on {plan.num_ranks} ranks{_nodes_text(plan)}"),
        ("problem", problem_text(plan.problem)),
        ("layout", _layout_text(plan)),
        ("digest", digest(plan)[:12]),
    ]
    lines = [f"{name:<9} {text}" for name, text in rows]
    for one in plan.passes:
        lines += [f"{one.direction}", *_pass_lines(plan, one, counts[one.direction])]
    return "\n".join(lines)


def _nodes_text(plan: Plan) -> str:
    if not plan.ranks_per_node:
        return ""
    mapped = "" if plan.devices == tuple(range(plan.num_ranks)) else ", mapped as patches of tiles"
    return f" in {plan.num_nodes} nodes of {plan.ranks_per_node}{mapped}"


def _layout_text(plan: Plan) -> str:
    (q, kv), inside = plan.shards, plan.q_layout
    block = f" by blocks of {inside.block}" if inside.block > 1 else ""
    if q.slots == kv.slots:
        slots = f"{q.slots} slots a rank"
    else:
        slots = f"{q.slots} query and {kv.slots} key slots a rank"
    padding = q.padded_tokens - q.num_tokens
    padded = f", {padding} of all query slots are padding" if padding else ""
    kind = f"contiguous shards, {inside.kind}" if plan.relayout else f"{inside.kind}"
    return f"{kind}{block}{' inside' if plan.relayout else ''}, {slots}{padded}"


def _pass_lines(plan: Plan, one: Pass, counted: PassCount) -> list[str]:
    numbers = counted.to_json()
    received, between = numbers["bytes_per_rank"], numbers["inter_node_bytes_per_rank"]
    volume = _mean_max_text(received)
    if plan.num_nodes > 1:
        volume += f"; between nodes {_mean_max_text(between)}"
    work = balance(plan, one)
    rows = [
        ("setting", ", ".join(f"{key} {value}" for key, value in one.setting.items())),
        ("groups", _groups_text(one)),
        ("receives", f"{volume}; {numbers['units_total']:g} units over all ranks"),
        ("buffers", f"at most {bytes_text(counted.peak_buffer_bytes)} of workspace at once"),
        ("balance", f"max/mean visible pairs {work.ratio:.4f}"),
        ("steps", f"{len(one.schedule.steps)}"),
    ]
    return [f"  {name:<8} {text}" for name, text in rows if text]


def _mean_max_text(values: dict[str, float]) -> str:
    mean = f"{bytes_text(values['mean'])} a rank"
    same = values["max"] == values["mean"]
    return mean if same else f"{mean} (max {bytes_text(values['max'])})"


def _groups_text(one: Pass) -> str:
    """Groups by the letters of their names: Q0, Q1, ... are the Q groups."""
    families: dict[str, list[str]] = {}
    for name in one.groups:
        families.setdefault(re.sub(r"\d+$", "", name), []).append(name)
    parts = []
    for family, names in families.items():
        members = one.groups[names[0]]
        shown = " ".join(map(str, members[:8])) + (" ..." if len(members) > 8 else "")
        parts.append(f"{len(names)} {family} of {len(members)} ({names[0]}: {shown})")
    return ", ".join(parts) or "none: every rank works alone"
