"""Docstrings list arguments in two columns, as terminals show well; on the site they are lists.

    group_or_mesh   a ProcessGroup or a 1-D DeviceMesh
    seq_len         tokens of the whole sequence

becomes one item for each name. `mkdocs.yml` loads this as an extension of griffe.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROW = re.compile(r"(?P<name>[\w.\"=,]+(?: [\w.\"=,]+)*) {2,}(?P<text>\S.*)")


class Columns(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(text: str) -> str:
    """A row is a name at the margin, two spaces or more, and text that may go on indented."""
    lines: list[str] = []
    in_row = False
    for line in text.splitlines():
        row = ROW.fullmatch(line)
        if row is not None:
            lines += [] if in_row else [""]
            lines.append(f"- `{row['name']}`: {row['text']}")
            in_row = True
        elif in_row and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            in_row = in_row and not line.strip()
            lines.append(line)
    return "\n".join(lines)
