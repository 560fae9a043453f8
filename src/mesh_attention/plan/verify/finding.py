"""What `verify` reports: the rank and the operation at which a plan breaks, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Broken", "Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    direction: str
    rank: int
    operation: str
    message: str

    def __str__(self) -> str:
        return f"{self.direction}, rank {self.rank}, {self.operation}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        return {
            "pass": self.direction,
            "rank": self.rank,
            "operation": self.operation,
            "message": self.message,
        }


class Broken(Exception):  # noqa: N818 - it never leaves the verifier
    """An operation cannot go on; carries the rank whose fault it shows."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.message = message
