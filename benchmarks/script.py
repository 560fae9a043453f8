"""What every script here shares: its arguments, and the date and commit that a result begins with.

Imports no torch, so that scripts that only plan start fast and run where torch is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def script_parser(doc: str | None, *, result: bool = True) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the script. `result`: with `--json FILE`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    if result:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    return parser


def provenance() -> dict[str, Any]:
    """The first fields of every result: without them a number cannot be measured again."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}


def commit(clone: Path = Path(__file__).parents[1]) -> str:
    copied = clone / "COMMIT"  # where the code was copied without its history
    if copied.exists():
        return copied.read_text().strip()
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def host() -> str:
    return f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}"


def save(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes a result, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
