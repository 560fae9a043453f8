"""A cluster as the text of its file, with a comment at each number that says where it is from.

The opposite of `machine/load.py`: what is written here is read there as the same cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import MOST_COLUMNS

Notes = Mapping[str, str | Sequence[str]]
_LONGEST = MOST_COLUMNS // 2


def cluster_text(cluster: Cluster, notes: Notes, head: Sequence[str]) -> str:
    """`notes` by place in the file ("node.peer.gb_per_second"): a text beside a number, or lines
    above it or at the beginning of a section. `head` are lines at the beginning of all."""
    lines = [_comment(line) for line in head]
    _add_table(lines, asdict(cluster), (), notes)
    return "\n".join(lines) + "\n"


def _add_table(
    lines: list[str], table: Mapping[str, Any], path: tuple[str, ...], notes: Notes
) -> None:
    values = {name: x for name, x in table.items() if x is not None and not isinstance(x, dict)}
    if path and (values or not table):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
        told = notes.get(".".join(path), ())
        lines += [_comment(line) for line in ([told] if isinstance(told, str) else told)]
    for name, value in values.items():
        note = notes.get(".".join((*path, name)), "")
        if not isinstance(note, str):
            lines += map(_comment, note)
            note = "" if not note else "fitted to the lines above"
        written = json.dumps(value, ensure_ascii=False)
        lines.append(f"{_key(name)} = {written}" + (f"  {_comment(note)}" if note else ""))
    for name, value in table.items():
        if isinstance(value, dict):
            _add_table(lines, value, (*path, name), notes)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _comment(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text)
    return f"# {shown[:_LONGEST]}".rstrip()
