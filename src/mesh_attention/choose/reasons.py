"""Why a plan was chosen, in one sentence: from what its programs move and from its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mesh_attention.cost.timeline import Timeline
from mesh_attention.plan.draw.summary import bytes_text

if TYPE_CHECKING:
    from mesh_attention.choose.one_pass import Standing


_LITTLE = 1e-3  # of the time: not worth a word
_ALIKE = 1.0005  # methods that make the same plan in other words are no rivals


def why(chosen: Sequence[Standing], standings: Sequence[Sequence[Standing]]) -> str:
    """Such as: usp beats mesh by 9 %: a rank receives 12 MiB, 4 MiB of it between nodes (mesh: 40
    and 31), and 0.4 ms of communication stay open (mesh: 1.9)."""
    names = " forward and ".join(dict.fromkeys(one.name for one in chosen))
    names += " backward" if " and " in names else ""
    totals: dict[str, list[Standing]] = {}
    for of_pass in standings:
        for one in of_pass:
            totals.setdefault(one.name, []).append(one)
    whole = {name: found for name, found in totals.items() if len(found) == len(chosen)}
    mine = {one.name for one in chosen}
    others = [name for name in whole if mine != {name}]
    mine_told = [one.timeline for one in chosen if one.timeline]
    told, idle = _told(mine_told), _idle(mine_told)
    if not others:
        return f"{names}: a rank receives {told}, and {idle}"
    seconds = {name: sum(one.seconds for one in whole[name]) for name in others}
    total = sum(one.seconds for one in chosen)
    known = {name for name in others if not any(one.is_bound for one in whole[name])}
    slower = {name for name in others if seconds[name] > _ALIKE * total}
    # What is only bounded may be much slower than its bound: it is second where nothing is known.
    rivals = (known & slower) or known or {*others}
    second = min(rivals, key=lambda name: (seconds[name], name))
    lead = 100 * (1 - total / seconds[second]) if seconds[second] else 0.0
    if second not in known:
        before = f"at least {lead:.2g} % before all other methods"
        before = before if lead >= 0.05 else "not slower than any other method"
        return f"{names} is {before}: a rank receives {told}, and {idle}"
    timelines = [one.timeline for one in whole[second] if one.timeline]
    against, left = f" ({second}: {_told(timelines)})", f" ({second}: {_idle(timelines)})"
    beats = f"beats {second} by {lead:.2g} %" if lead >= 0.05 else f"is as fast as {second}"
    return f"{names} {beats}: a rank receives {told}{against}, and {idle}{left}"


def _idle(timelines: Sequence[Timeline]) -> str:
    """What a rank does not compute in, in the mean: its own transfers, and others' work."""
    waiting = sum(one.waiting_for_ranks_seconds for one in timelines)
    stays_open = sum(one.open_communication_seconds for one in timelines)
    total = sum(one.runtime_seconds for one in timelines)
    if waiting < _LITTLE * total:
        return f"{stays_open * 1e3:.3g} ms of communication stay open"
    waits = f"it waits {waiting * 1e3:.3g} ms for slower ranks"
    if stays_open < _LITTLE * total:
        return waits
    return f"{stays_open * 1e3:.3g} ms of communication stay open, while {waits}"


def _told(timelines: Sequence[Timeline]) -> str:
    """What the rank that receives most does in all passes."""
    total = sum(max(one.received_bytes) for one in timelines)
    between = sum(max(one.far_bytes) for one in timelines)
    if not total:
        return "nothing"
    if timelines[0].plan.num_nodes == 1:
        return bytes_text(total)
    if not between:
        return f"{bytes_text(total)}, all inside nodes"
    return f"{bytes_text(total)}, {bytes_text(between)} of it from other nodes"
