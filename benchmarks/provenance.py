"""When and of which commit a result is: a number without them cannot be repeated."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["commit", "taken"]


def taken() -> dict[str, str]:
    """What every report begins with."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}


def commit() -> str:
    here = Path(__file__).parent
    told = here.parent / "COMMIT"  # where the code was copied without its history
    if told.exists():
        return told.read_text().strip()
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
