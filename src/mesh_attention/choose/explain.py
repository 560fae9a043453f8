"""Explains a choice in words: its time against usual methods, and what a rank receives and waits
for. `advise` and the report print them.

Modelled times differ from measured times by a few percent (`docs/simulate.md`), so plans within 3 %
of each other are a tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh_attention.choose.scored import Scored
from mesh_attention.cost.timeline import Timeline
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import USUAL
from mesh_attention.plan.problem.arguments import bytes_text

TIE = 0.03
TIE_TEXT = f"within {TIE:.0%}, which the model cannot tell apart".replace("%", " %")
_LITTLE = 0.01  # of the time: not mentioned

Passes = Mapping[Direction, Scored]


def explain(
    chosen: Passes, methods: Mapping[str, Passes], refused: Sequence[str], num_ranks: int
) -> str:
    """A text such as: mesh-usp takes 401 ms forward and backward: 12 % less time than usp (456 ms),
    60 % less time than ring (about 1.01 s); ulysses cannot run on 256 ranks. A rank receives ..."""
    seconds, names = seconds_of(chosen), [scored.name for scored in chosen.values()]
    if len({*names}) == 1:
        text = f"{names[0]} takes {about(chosen)} {' and '.join(chosen)}"
    else:
        each = " and ".join(f"{scored.name} {direction}" for direction, scored in chosen.items())
        text = f"{each} take {about(chosen)} together"
    others = {n: methods[n] for n in USUAL if n in methods and {*names} != {n}}
    compared = [_compared(seconds, name, passes) for name, passes in others.items()]
    cannot = [name for name in USUAL if name in refused]
    if compared:
        text += f": {', '.join(compared)}"
    if cannot:
        text += f"; {' and '.join(cannot)} cannot run on {num_ranks} ranks"
    timelines = [x.timeline for x in chosen.values() if x.timeline is not None]
    moves = f" A rank receives {_received(timelines)}; {_idle(timelines)}." if timelines else ""
    return f"{text}.{moves}"


def seconds_of(passes: Passes) -> float:
    return sum(scored.seconds for scored in passes.values())


def about(passes: Passes) -> str:
    """The seconds of these passes as a text, with "about" if they were not all simulated."""
    simulated = all(scored.is_simulated for scored in passes.values())
    return f"{'' if simulated else 'about '}{time_text(seconds_of(passes))}"


def is_tie(seconds: float, other: float) -> bool:
    """
    >>> is_tie(0.98, 1.0), is_tie(0.96, 1.0)
    (True, False)
    """
    return abs(other - seconds) < TIE * max(seconds, other)


def behind(seconds: float, other: float) -> str:
    """How far `seconds` are behind `other`, which is no slower.

    >>> behind(1.01, 1.0), behind(1.5, 1.0), behind(3.0, 1.0)
    ('as fast (within 3 %, which the model cannot tell apart)', '50 % more', '3 times as long')
    """
    if is_tie(seconds, other):
        return f"as fast ({TIE_TEXT})"
    more = seconds / other - 1
    return f"{100 * more:.0f} % more" if more < 1 else f"{1 + more:.2g} times as long"


def time_text(seconds: float) -> str:
    """
    >>> time_text(0.40134), time_text(1.0134), time_text(0.0000234)
    ('401 ms', '1.01 s', '0.0234 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"


def _compared(seconds: float, name: str, passes: Passes) -> str:
    other = seconds_of(passes)
    if is_tie(seconds, other):
        return f"as fast as {name} ({about(passes)}, within {TIE:.0%})".replace("%", " %")
    return f"{100 * (1 - seconds / other):.0f} % less time than {name} ({about(passes)})"


def _idle(timelines: Sequence[Timeline]) -> str:
    """Says how long a rank does not compute, in the mean: while it transfers, and while it waits
    for other ranks."""
    waiting = sum(timeline.waiting_for_ranks_seconds for timeline in timelines)
    exposed = sum(timeline.open_communication_seconds for timeline in timelines)
    total = sum(timeline.runtime_seconds for timeline in timelines)
    parts = []
    if exposed >= _LITTLE * total or waiting < _LITTLE * total:
        parts.append(f"{1e3 * exposed:.3g} ms of communication are exposed")
    if waiting >= _LITTLE * total:
        parts.append(f"it waits {1e3 * waiting:.3g} ms for slower ranks")
    return " and ".join(parts)


def _received(timelines: Sequence[Timeline]) -> str:
    """Says how much the rank that receives most receives in all passes."""
    total = sum(max(timeline.received_bytes) for timeline in timelines)
    between = sum(max(timeline.far_bytes) for timeline in timelines)
    if not total:
        return "nothing"
    if timelines[0].plan.num_nodes == 1:
        return bytes_text(total)
    if not between:
        return f"{bytes_text(total)}, all inside nodes"
    return f"{bytes_text(total)}, {bytes_text(between)} of it from other nodes"
