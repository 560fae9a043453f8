"""Agreement before data moves: every rank says what it is about to do, and all get the verdict.

Ranks that hold another plan, pass other shapes or dtypes, or found an error of their own would hang
or, worse, compute nonsense. So before the first collective of a new kind of call each rank posts
its statement in the job's key-value store; the first rank compares and posts the verdict; and if
they differ, every rank raises an error that names the odd one. It uses no collective and no
device, and calls of a kind that was agreed on before skip it.

Of their plans ranks compare digests: of the question, and for each group of the collectives in
which its members meet (`plan/read/agreement.py`).
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.agreement.identity import OF_ONE_KIND, Statement
from mesh_attention.runtime.agreement.verdict import (
    COMPARE_PROGRAMS,
    FOLLOW,
    LEFT_TO_THE_CALL,
    OUT_OF_STEP,
    Said,
    error_text,
    read_said,
    verdict_on,
)
from mesh_attention.runtime.transport.groups import Groups, default_store
from mesh_attention.runtime.transport.job_store import JobStore, as_number, as_words

_PATIENCE_SECONDS = 10.0  # then a warning says who is missing
_GRACE_SECONDS = 1.5  # after a contradiction, for the others to say which side they are on
_LOOK_AROUND_SECONDS = 1.0
_PAUSE_SECONDS = 0.01
_AGREED = "agreed"
_CALLS = {"needs_grad": "attention", "programs": "ContextParallel(...)"}  # of `OF_ONE_KIND`


class DisagreementError(MeshAttentionError):
    """The ranks of a group do not agree on a call; raised on all of them."""


class Handshake:
    """A rank's part in the agreements of a session. Each is a round of its own in the store; ranks
    count rounds alike, since they agree on the same calls in the same order."""

    def __init__(self, groups: Groups) -> None:
        self._ranks = groups.ranks
        self._me = groups.global_rank_of_self
        self.store = JobStore(f"{groups.lasting_name}/agreement", default_store())
        self._timeout = groups.timeout(None)
        # Why others will never come, if that is known; asked in a long wait.
        self.find_cause: Callable[[], str | None] = lambda: None
        self._lock = threading.Lock()  # the thread that watches calls may take part for us
        self._rounds = 0
        self._first_kept = 1  # rounds before it have no keys in the store any more
        self.followed: str | None = None  # what the first rank chose by, where others differed
        self.left_in_flight = False  # a rank was in a call when the last agreement failed
        self.unheard: str | None = None  # a round that failed before all had spoken
        self.left_to_the_call = False  # ranks differ; those that asked must go on and compare

    def is_called_for(self, call: int) -> bool:
        """Whether a rank that is not at this call yet asks for an agreement that we took for
        made."""
        if self._lock.locked():
            return False  # we are making one
        key = f"round{self._rounds + 1}/call"
        return any(as_number(asked) < call for asked in self.store.there([key]).values())

    def agree(
        self,
        statement: Statement,
        error: Exception | None = None,
        *,
        call: int,
        timeout: timedelta,
        first: bool = False,
        in_flight: bool = False,
        waits: bool = False,
    ) -> bool:
        """Returns when all ranks have made the same statement and none has an error; else raises.
        True: some ranks made their programs and others got them from the caller, so all programs
        must be compared.

        A rank with an error of its own raises that error. It does not wait long for the others,
        who may be past the agreement already: see `hear_silent`.

        call       how many calls this rank has begun
        first      no kind of call is known, so nobody can be past the agreement
        in_flight  the last call of this rank waits for this agreement
        waits      its data waits too, so nothing has moved
        """
        with self._lock:
            self._timeout = timeout
            self.store.allow(timeout.total_seconds())
            self._rounds += 1
            prefix = f"round{self._rounds}"
            said = {
                "statement": statement,
                "error": error and error_text(error),
                "in_flight": in_flight,
                "waits": waits,
            }
            self.store.set(f"{prefix}/{self._me}", json.dumps(said, sort_keys=True))
            if not in_flight:  # those who join later look how far the one got who asks them to
                self.store.compare_set(f"{prefix}/call", "", str(call))
            try:
                grace = _PATIENCE_SECONDS if first else _GRACE_SECONDS
                verdict = self._verdict(prefix, statement, error, grace)
            except Exception:
                heard = self._statements(prefix, {})
                self.left_in_flight = any(s["in_flight"] for s in heard.values())
                self.unheard = None if first or len(heard) == len(self._ranks) else prefix
                raise
            self.unheard = None
            self._forget_earlier_rounds()
            follow = verdict.startswith(FOLLOW)
            self.followed = verdict.removeprefix(FOLLOW) if follow else None
            self.left_to_the_call = verdict == LEFT_TO_THE_CALL
            return verdict == COMPARE_PROGRAMS

    def hear_silent(self) -> str | None:
        """Asked before data moves. Ranks that were silent when an agreement failed are late, or in
        a call that waits for us, whose data the next call must not take for its own: wait until
        they say which, as they do when they come, or see that others have asked. Returns why all
        is lost, if it is."""
        prefix = self.unheard
        if prefix is None:
            return None
        limit = self._timeout.total_seconds()
        self.store.allow(limit)
        begun = looked = time.monotonic()
        while len(heard := self._statements(prefix, {})) < len(self._ranks):
            now = time.monotonic()
            if now - looked > _LOOK_AROUND_SECONDS:
                looked = now
                if cause := self.find_cause():
                    return cause
            if now - begun > limit:
                return f"{self._missing(prefix)} did not come within {limit:.0f} s; {OUT_OF_STEP}"
            time.sleep(_PAUSE_SECONDS)
        self.unheard = None
        in_flight = any(its["in_flight"] for its in heard.values())
        return as_words(self.store.get(f"{prefix}/verdict")) if in_flight else None

    def _forget_earlier_rounds(self) -> None:
        """All ranks have spoken in this round, so none of them reads an earlier one any more."""
        names = [str(self._me)] + ["verdict", "call"] * (self._me == self._ranks[0])
        earlier = range(self._first_kept, self._rounds)
        self.store.forget([f"round{number}/{name}" for number in earlier for name in names])
        self._first_kept = self._rounds

    def _verdict(
        self, prefix: str, statement: Statement, error: Exception | None, grace: float
    ) -> str:
        """The verdict of a round, as an error unless all agree.

        The first rank judges for all; where it does not come, each judges for itself. The first
        verdict is that of all ranks, also of those who come late.
        """
        key, said = f"{prefix}/verdict", Said()
        limit = self._timeout.total_seconds()
        limit = limit if error is None else min(limit, _PATIENCE_SECONDS)
        judges_from = 0.0 if self._me == self._ranks[0] else 2 * _GRACE_SECONDS
        begun, pause = time.monotonic(), 0.001
        contradicted, warned, looked = math.inf, False, begun
        while not self.store.check([key]):
            waited, verdict = time.monotonic() - begun, ""
            if waited >= judges_from:
                said = dict(sorted((said | self._statements(prefix, said)).items()))
                complete = len(said) == len(self._ranks)
                difference = verdict_on(said, complete=complete)
                contradicted = min(contradicted, waited) if difference else contradicted
                # Those who are silent may be past the agreement, and wait for us in the call.
                if complete or waited > contradicted + grace:
                    verdict = difference or _AGREED
            if waited > limit:
                verdict = f"rank {self._me}: {error and error_text(error)}"
                if error is None:  # those who come later are a round behind: none goes on
                    verdict = f"{self._missing(prefix)} did not reach the same call"
                    verdict += f"{_named(statement)} within {limit:.0f} s; {OUT_OF_STEP}"
            if not verdict and time.monotonic() - looked > _LOOK_AROUND_SECONDS:
                looked = time.monotonic()
                verdict = self.find_cause() or ""
            if verdict:
                self.store.compare_set(key, "", verdict)
                continue
            if waited > _PATIENCE_SECONDS and not warned:
                warned = True
                warnings.warn(
                    f"rank {self._me} has waited {waited:.0f} s for {self._missing(prefix)} "
                    f"to reach the same call{_named(statement)}",
                    stacklevel=2,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        if error is not None:
            raise error
        verdict = self.store.get(key).decode(errors="replace")
        goes_on = verdict in (_AGREED, COMPARE_PROGRAMS, LEFT_TO_THE_CALL)
        if not goes_on and not verdict.startswith(FOLLOW):
            raise DisagreementError(as_words(verdict.encode()))
        return verdict

    def _statements(self, prefix: str, known: Said) -> Said:
        """What ranks have said since we last looked."""
        keys = {rank: f"{prefix}/{rank}" for rank in self._ranks if rank not in known}
        there = self.store.there(keys.values())
        return {rank: read_said(there[key]) for rank, key in keys.items() if key in there}

    def _missing(self, prefix: str) -> str:
        spoken = self._statements(prefix, {})
        absent = [rank for rank in self._ranks if rank not in spoken]
        return f"ranks {absent}" if absent else f"rank {self._ranks[0]} (its verdict)"


def _named(statement: Statement) -> str:
    """The call that is stated, in brackets, where it has a name."""
    names = [name for name in OF_ONE_KIND if name in statement]
    return f" ({_CALLS.get(names[0], names[0])})" if names else ""
