"""The guard of a session: no result is made from another call's data, and no rank waits in vain.

Every pass begins with `begin`, which compares its identity among all ranks, and ends with `settle`.
An exception in between leaves the call half done: then the guard finds the cause, tells the others,
drops all connections, so that nobody waits for this rank, and refuses whatever comes later.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.agreement.faults import Faults
from mesh_attention.runtime.agreement.handshake import DisagreementError, Handshake
from mesh_attention.runtime.agreement.identity import HostComparison, Identity
from mesh_attention.runtime.agreement.verdict import OUT_OF_STEP, error_text, verdict_on
from mesh_attention.runtime.agreement.watch import DeviceComparison, Watch
from mesh_attention.runtime.transport.distributed import CommunicationError, communicating
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.job_store import ANSWER_SECONDS, LostStoreError

Raised = TypeVar("Raised", bound=BaseException)
_OWN_FILES = (str(Path(__file__).parents[2]), str(Path(dist.__file__).parent))


class Guard:
    """`drop`: a method that gives up all that calls hold, process groups last. It is held weakly,
    so that a session is gone as soon as it is dropped, and with it what it holds."""

    def __init__(self, groups: Groups, handshake: Handshake, drop: Callable[[], None]) -> None:
        self._groups = groups
        self._handshake = handshake
        self._drop = WeakMethod(drop)
        self._faults = Faults(groups)
        handshake.find_cause = lambda: self._faults.find_cause(groups.releases)
        self._nccl = groups.backend == dist.Backend.NCCL
        self._cause: str | None = None  # why everything is refused
        self._current: Identity | None = None
        self._alone = len(groups.ranks) == 1
        self._comparison: HostComparison | None = None
        self._timeout = groups.timeout(None)
        self._watch: Watch | None = None
        self.place = 0  # of the call that this rank is at, among all of them
        self.compared = False  # in the call that was entered; others may be in it, or past it
        self._known = 0  # the error, by its id, that a call raises and others need not be told
        self.left_by: str | None = None  # an error that has ended a call and was not told yet
        # Of the thread that is in a call; one inside another, as in a backward pass that attends
        # again, is in the same thread.
        self.turn = threading.RLock()
        self.crossed: str | None = None  # a call of another thread came meanwhile, in words

    @property
    def broken(self) -> bool:
        return self._cause is not None

    # A call.

    def enter(self) -> None:
        """A call of this rank begins. An error that ends it is told to the others, unless it is
        `known`."""
        self._known, self.compared = 0, False

    def cross(self) -> MeshAttentionError:
        """Of two threads nobody knows which is first on other ranks: what they make is mixed up.
        The other thread may be in a transfer: so it breaks off, when it comes to its end."""
        self.crossed = (
            f"rank {self._groups.global_rank_of_self}: a call in thread "
            f"{threading.current_thread().name!r} began while another thread was in one on the "
            "same process group, and other ranks may have them in another order; make all calls "
            "on a group in one thread, or give each thread a group of its own "
            "(torch.distributed.new_group)"
        )
        self._faults.tell(self.crossed)
        return self.known(MeshAttentionError(self.crossed))

    def known(self, error: Raised) -> Raised:
        """Marks an error that others need not be told: all ranks know it, or it ends no call."""
        self._known = id(error)
        return error

    def is_known(self, error: BaseException) -> bool:
        return self.broken or isinstance(error, DisagreementError) or self._known == id(error)

    def begin(
        self, identity: Identity, timeout: timedelta | None, stream: torch.cuda.Stream | None
    ) -> None:
        """All ranks are at this call, or none of them gets a result from it.

        `timeout`: None is that of the group.
        `stream`: of communications, where the call runs on a CUDA device.
        """
        if self._alone:
            return
        if self._handshake.unheard is not None:
            with self.whole_or_broken():
                lost = self._handshake.hear_silent()
            if lost is not None:
                self._break_off(self._faults.tell(lost))
                self.refuse_if_broken()
        self.compared = True
        self.place += 1
        self._current = identity
        with self.whole_or_broken():
            agreed = self._compare(identity, timeout, stream)
        if not agreed:  # nothing has moved, and all ranks know it
            difference = self._difference(self.place, identity)
            if difference:
                self.refuse(difference)
            with self.whole_or_broken():
                raise CommunicationError("the ranks could not compare calls")

    def refuse(self, difference: str) -> NoReturn:
        """A call that ranks differ in, as all of them know, before anything has moved."""
        if OUT_OF_STEP not in difference:
            raise DisagreementError(difference)
        with self.whole_or_broken():
            raise DisagreementError(difference)

    def _compare(
        self, identity: Identity, timeout: timedelta | None, stream: torch.cuda.Stream | None
    ) -> bool:
        with communicating("the ranks could not compare calls"):
            if timeout != self._groups.asked_timeout:
                self._groups.set_timeout(timeout)
            self._timeout = self._groups.limit
            if self._nccl and stream is not None:
                self._watched(stream).begin(identity, self.place, self._timeout)
                return True  # for now
            if self._comparison is None:
                self._comparison = HostComparison(self._groups.everybody())
            return self._comparison.agrees(identity.number, self._look_around)

    def settle(self, results: Iterable[Tensor]) -> None:
        """What a pass has made is right, or NaN."""
        if self._watch is not None:
            self._watch.comparison.settle(results, self.place)

    def _watched(self, stream: torch.cuda.Stream) -> Watch:
        if self._watch is None:
            # PyTorch makes a communicator in its first call, and not every exchange has all ranks.
            everybody, number = self._groups.everybody(), torch.zeros(1, device=stream.device)
            dist.all_reduce(number, group=everybody)
            comparison = DeviceComparison(everybody, stream.device)
            self._watch = Watch(comparison, self._find_difference, self._find_fault)
        return self._watch

    def _difference(self, place: int, identity: Identity) -> str:
        """In words, with those of `OUT_OF_STEP` unless all ranks are at the same point of their
        programs, as far as anybody can tell, and differ in what they call with. Empty where those
        that answer are at the same call: then another has ended."""
        try:
            said = self._faults.statements(place, identity)
        except LostStoreError as lost:
            return f"{OUT_OF_STEP}; {lost}"
        verdict = verdict_on(said, complete=False)
        unsure = len(said) < len(self._groups.ranks) and OUT_OF_STEP not in verdict
        return f"{verdict}; {OUT_OF_STEP}" if verdict and unsure else verdict

    def _look_around(self, waited: float) -> None:
        """Asked during a long wait. Another rank may be at something else, and wait for an
        agreement that we took for made: then all of us make it, and learn who is odd."""
        limit = self._timeout.total_seconds()
        self._handshake.store.allow(limit - waited)
        self._faults.store.allow(limit - waited)
        if self._handshake.is_called_for(self.place) and self._current is not None:
            statement = self._current.kind.agreed_statement
            timeout, waits = self._timeout, not self._nccl
            self._handshake.agree(
                statement, call=self.place, timeout=timeout, in_flight=True, waits=waits
            )
        cause = self._faults.find_cause(self._groups.releases)
        if cause is not None:
            raise CommunicationError(cause)
        if waited > limit:
            raise CommunicationError(f"not all ranks came to this call within {limit:.0f} s")

    # On a device nobody waits: the thread that watches calls these.

    def _find_difference(self, place: int, identity: Identity) -> None:
        self._break_off(self._difference(place, identity) or "the ranks are at different calls")

    def _find_fault(self, identity: Identity, timeout: timedelta, waited: float) -> bool:
        """Whether a call that makes no progress is lost; then it is broken off."""
        self._current, self._timeout = identity, timeout
        try:
            self._look_around(waited)
        except CommunicationError as error:
            self._break_off(self._faults.explain(str(error), self._groups.releases))
        except MeshAttentionError as error:
            self._break_off(self._faults.tell(str(error)))
        return self.broken

    # Faults.

    @contextmanager
    def whole_or_broken(self) -> Iterator[None]:
        """Around what ranks do together: any exception in it leaves a call half done."""
        try:
            yield
        except CommunicationError as error:
            if self._cause is not None:  # the thread that watches was faster
                raise CommunicationError(self._cause) from error
            explained = CommunicationError(self._faults.explain(str(error), self._groups.releases))
            self._break_off(str(explained), error)
            raise explained from error
        except BaseException as error:
            self.break_off(error)
            raise

    def break_off(self, error: BaseException) -> None:
        """Calls may be in flight that nobody will finish."""
        if isinstance(error, DisagreementError):  # all ranks say the same
            self._break_off(self._faults.tell(str(error)), error)
        else:
            self._break_off_by(error_text(error), error)

    def _break_off_by(self, words: str, error: BaseException | None = None) -> None:
        me = self._groups.global_rank_of_self
        self._break_off(self._faults.tell(f"rank {me} broke off a call: {words}"), error)

    def _break_off(self, cause: str, error: BaseException | None = None) -> None:
        if self._cause is None:
            self._cause = cause
            if self._watch is not None:
                self._watch.comparison.spoil()
            if error is not None:
                _forget_locals(error)
            self._comparison = None
            # Those who wait for us learn from the closed connection that they wait in vain.
            drop = self._drop()
            if drop is not None:
                drop()

    def hear(self) -> None:
        """Others may have refused everything before this rank came to a call."""
        with suppress(LostStoreError):
            cause = None if self.broken or self._alone else self._faults.cause()
            if cause is not None:
                self._break_off(cause)
        self.refuse_if_broken()

    def refuse_if_broken(self) -> None:
        if self._watch is not None:
            self._watch.wait_for_verdict(ANSWER_SECONDS)
        if self.crossed is not None and self._cause is None:
            self._break_off(self._faults.tell(self.crossed))
        if self.left_by is not None:
            self._break_off_by(self.left_by)
            self.left_by = None
        if self._cause is None:
            return
        if OUT_OF_STEP in self._cause:
            state = (
                "the ranks of this process group are out of step since an earlier call, and would "
                f"take each other's next calls for their own ({self._cause})"
            )
            way_out = "go back to a point that all ranks have in common, a checkpoint say, and "
        else:
            state = (
                "an earlier call on this process group was broken off, and transfers may be in "
                f"flight, which a new call could take for its own ({self._cause})"
            )
            way_out = ""
        raise MeshAttentionError(
            f"{state}; everything on this group is refused, also for other ContextParallel objects "
            f"and mesh_attention(): {way_out}start the processes anew, or make new process groups "
            "(torch.distributed.new_group)"
        )

    def rest(self) -> None:
        """The last user of the session has closed it."""
        self._comparison = None
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if not self.broken:
            self._faults.leave(self._groups.releases + 1)


def _forget_locals(error: BaseException) -> None:
    """Of our frames and torch.distributed's: they hold process groups, whose connections close
    when the last who holds them lets go. The caller's frames are left as they are."""
    link: BaseException | None = error
    while link is not None:
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_code.co_filename.startswith(_OWN_FILES):
                with suppress(RuntimeError):  # still running
                    frame.clear()
        link = link.__cause__ or link.__context__
