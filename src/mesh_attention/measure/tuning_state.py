"""What a tuning has measured so far, in a file beside the answers: a tuning that was ended goes on.

One file for what is asked (problem, ranks, cluster, options, and where it runs), written whole
after every measurement. One that is damaged or about something else is told and taken for missing.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from mesh_attention.choose.answers import answers_folder
from mesh_attention.errors import MeshAttentionError
from mesh_attention.files import check_writable, read_text, replacing

VERSION = 2
_MOST_BYTES = 1 << 20
_CANNOT_RUN = "cannot_run"

Known = dict[str, float | str]  # by `Contender.key`: seconds, or why it cannot run


class TuningState:
    """Of the first rank; others hear from it."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = json.loads(json.dumps(asked, sort_keys=True))
        text = json.dumps(self._asked, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.file: Path = answers_folder() / f"tuning-{name}.json"

    def prepare(self) -> None:
        """Refuses now what could not be kept later."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        check_writable(self.file)

    def read(self) -> Known:
        """Nothing where nothing was measured."""
        try:
            if not self.file.exists():
                return {}
            told = json.loads(read_text(self.file, most_bytes=_MOST_BYTES))
            if told["version"] != VERSION:
                raise ValueError(f"it is of version {told['version']}, not {VERSION}")
            if told["asked"] != self._asked:
                raise ValueError("it is about something else")
            return {str(key): _known(value) for key, value in told["measured"].items()}
        except (
            *(MeshAttentionError, OSError, ValueError, KeyError, TypeError, AttributeError),
            RecursionError,
        ) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            warnings.warn(
                f"{self.file} is damaged or outdated and is ignored: {what}", stacklevel=2
            )
            return {}

    def write(self, known: Mapping[str, float | str]) -> None:
        measured = {
            key: {_CANNOT_RUN: value} if isinstance(value, str) else value
            for key, value in known.items()
        }
        told = {"version": VERSION, "asked": self._asked, "measured": measured}
        with replacing(self.file) as part:
            part.write_text(json.dumps(told), encoding="utf-8")


def _known(value: Any) -> float | str:
    if isinstance(value, dict):
        return str(value[_CANNOT_RUN])
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{value!r} is no time")
    return float(value)
