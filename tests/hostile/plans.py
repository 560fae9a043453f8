"""Damaged plans: whatever `verify` accepts is run, and must give the right numbers."""

from __future__ import annotations

from collections import Counter

from damaged_plans import damaged, verdict

from hostile.campaign import Hang, Verdict, within

__all__ = ["Plans"]

LIMIT = 60.0  # seconds of one plan


class Plans:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def case(self, number: int) -> Verdict:
        text, name = damaged(f"hostile {self._seed}", number)
        try:
            with within(LIMIT):
                return Verdict(Counter({verdict(text): 1}))
        except (Exception, Hang) as error:
            kind = (
                "accepted, and wrong" if isinstance(error, AssertionError) else type(error).__name__
            )
            return Verdict(Counter({kind: 1}), (f"{name}: {type(error).__name__}: {error}",))

    def close(self) -> None:
        pass
