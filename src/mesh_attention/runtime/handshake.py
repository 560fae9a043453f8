"""Agreement before data moves: every rank says what it is about to do, and all hear the verdict.

Ranks that hold another plan, pass other shapes or dtypes, or found an error of their own would hang
or, worse, compute nonsense. So before the first collective of a new kind of call each rank posts
its statement in the job's key-value store; the first rank compares and posts the verdict; and if
they differ, every rank raises an error that names the odd one. It uses no collective and no
device, and calls of a kind that was agreed on before skip it.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.make_group import default_store, timeout_of

__all__ = ["DisagreementError", "Handshake"]

_PATIENCE_SECONDS = 10.0  # then a warning says who is missing
_GRACE_SECONDS = 1.5  # after a contradiction, for the others to say which side they are on


class DisagreementError(MeshAttentionError):
    """The ranks of a group do not agree on a call; raised on all of them."""


class Handshake:
    def __init__(self, groups: Groups, timeout: timedelta | None = None) -> None:
        self._ranks = groups.ranks
        self._me = groups.global_rank_of_self
        self._store = PrefixStore(f"{groups.name}/agreement", default_store())
        self._timeout = timeout or timeout_of(groups.parent)
        self._rounds = 0
        self.left_under_way = False  # a disagreement broke a call off, or may have, on some rank

    def is_called_for(self, call: int) -> bool:
        """Has a rank asked for an agreement on this call, or one before, that we took for made?"""
        key = f"round{self._rounds + 1}/call"
        return bool(self._store.check([key])) and int(self._store.get(key)) <= call

    def agree(
        self,
        statement: dict[str, Any],
        error: Exception | None = None,
        *,
        call: int = 0,
        under_way: bool = False,
    ) -> None:
        """Returns when all ranks made the same statement and none has an error.

        A rank with an error of its own raises that error; it does not wait long for the others,
        who may be past the agreement already. `under_way`: we are, and have begun the call.
        """
        self._rounds += 1
        prefix = f"round{self._rounds}"
        said_error = None if error is None else str(error)
        mine = {"statement": statement, "error": said_error, "under_way": under_way}
        self._store.set(f"{prefix}/{self._me}", json.dumps(mine, sort_keys=True))
        self._store.set(f"{prefix}/call", str(call))
        try:
            self._hear(prefix, error)
        except Exception:
            said = self._spoken(prefix, {})
            silent = len(said) < len(self._ranks)
            self.left_under_way |= silent or any(one["under_way"] for one in said.values())
            raise

    def _hear(self, prefix: str, error: Exception | None) -> None:
        """The verdict of a round, as an error unless all agree."""
        try:
            if self._me == self._ranks[0]:
                self._judge(prefix, patient=error is None)
            else:
                self._await_verdict(prefix, patient=error is None)
            verdict = self._get(f"{prefix}/verdict", list(self._ranks), patient=error is None)
        except DisagreementError:
            if error is None:
                raise
            if self._me == self._ranks[0]:  # for those who come later
                self._store.set(f"{prefix}/verdict", f"rank {self._me}: {error}")
            raise error from None
        if error is not None:
            raise error
        if verdict:
            raise DisagreementError(verdict.decode())

    def _await_verdict(self, prefix: str, *, patient: bool) -> None:
        """The first rank judges for all; where it does not come, each judges for itself."""
        try:
            self._store.wait([f"{prefix}/verdict"], timedelta(seconds=2 * _GRACE_SECONDS))
        except RuntimeError:
            self._judge(prefix, patient=patient)

    def _judge(self, prefix: str, *, patient: bool) -> None:
        """The verdict falls when all have spoken, or soon after some have contradicted others:
        the rest may be past the agreement, and wait for ranks that will never come."""
        said: dict[int, dict[str, Any]] = {}
        begun = time.monotonic()
        limit = self._timeout.total_seconds()
        limit = limit if patient else min(limit, _PATIENCE_SECONDS)
        contradicted: float | None = None
        warned = False
        pause = 0.001
        while True:
            said |= self._spoken(prefix, said)
            waited = time.monotonic() - begun
            if contradicted is None and _verdict(said):
                contradicted = waited
            enough = contradicted is not None and waited > contradicted + _GRACE_SECONDS
            if len(said) == len(self._ranks) or enough:
                break
            if waited > limit:
                raise DisagreementError(self._too_late(list(self._ranks), limit))
            if waited > _PATIENCE_SECONDS and not warned:
                warned = True
                self._warn(list(self._ranks), waited)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        self._store.set(f"{prefix}/verdict", _verdict(said))

    def _spoken(self, prefix: str, known: dict[int, Any]) -> dict[int, dict[str, Any]]:
        """What ranks have said since we last looked."""
        keys = {rank: f"{prefix}/{rank}" for rank in self._ranks if rank not in known}
        return {
            rank: json.loads(self._store.get(key))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _warn(self, awaited: list[int], seconds: float) -> None:
        warnings.warn(
            f"rank {self._me} has waited {seconds:.0f} s for {self._missing(awaited)} "
            "to reach the same attention call",
            stacklevel=3,
        )

    def _too_late(self, awaited: list[int], seconds: float) -> str:
        return (
            f"{self._missing(awaited)} did not reach the same attention call within {seconds:.0f} s"
        )

    def _get(self, key: str, awaited: list[int], *, patient: bool) -> bytes:
        begun = time.monotonic()
        patience = min(timedelta(seconds=_PATIENCE_SECONDS), self._timeout)
        try:
            self._store.wait([key], patience)
        except RuntimeError as late:
            if not patient:
                raise DisagreementError(f"{self._missing(awaited)} did not come") from late
            self._warn(awaited, patience.total_seconds())
            self._wait_on(key, awaited, begun)
        value: bytes = self._store.get(key)
        return value

    def _wait_on(self, key: str, awaited: list[int], begun: float) -> None:
        limit = self._timeout.total_seconds()
        left = limit - (time.monotonic() - begun)
        try:
            self._store.wait([key], timedelta(seconds=max(left, 0.001)))
        except RuntimeError as error:
            raise DisagreementError(self._too_late(awaited, limit)) from error

    def _missing(self, awaited: list[int]) -> str:
        prefix = f"round{self._rounds}"
        absent = [r for r in awaited if not self._store.check([f"{prefix}/{r}"])]
        return f"ranks {absent}" if absent else f"rank {self._ranks[0]} (its verdict)"


def _verdict(said: dict[int, dict[str, Any]]) -> str:
    """Empty if all agree; otherwise one line that names the odd ranks."""
    broken = [(rank, one["error"]) for rank, one in said.items() if one["error"]]
    if broken:
        rank, error = broken[0]
        others = f" (and {len(broken) - 1} more ranks)" if len(broken) > 1 else ""
        return f"rank {rank}{others}: {error}"
    texts = {rank: json.dumps(one["statement"], sort_keys=True) for rank, one in said.items()}
    usual = Counter(texts.values()).most_common(1)[0][0]
    odd = [rank for rank, text in texts.items() if text != usual]
    if not odd:
        return ""
    expected, found = json.loads(usual), said[odd[0]]["statement"]
    fields = [name for name in expected if expected[name] != found.get(name)]
    differ = "; ".join(f"{f} is {found.get(f)!r} there, {expected[f]!r} elsewhere" for f in fields)
    who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {odd}"
    if 2 * len(odd) == len(said):  # no majority says who is right
        who += f" (or {[rank for rank in said if rank not in odd]})"
    return f"{who} of the group {sorted(said)} disagrees: {differ}"
