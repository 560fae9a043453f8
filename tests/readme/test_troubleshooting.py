"""Every message that docs/troubleshooting.md quotes is one that the library has."""

from __future__ import annotations

import re
from pathlib import Path

import mesh_attention

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
SOURCE = Path(mesh_attention.__file__).parent


def test_every_quoted_message_is_in_the_source() -> None:
    """In one string, of however many lines of code; "..." stands for values."""
    quoted = re.findall(r"^> `(.+)`$", PAGE, flags=re.MULTILINE)
    assert len(quoted) >= 25
    code = "\n".join(file.read_text() for file in SOURCE.rglob("*.py"))
    joined = re.sub(r"""["']\s*\n\s*f?["']""", "", code)
    missing = [
        message
        for message in quoted
        if not re.search(".*".join(map(re.escape, message.strip(". ").split("..."))), joined)
    ]
    assert missing == []
