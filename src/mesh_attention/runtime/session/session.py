"""The session of a process group: all that outlives plans, shared by everybody who calls on it.

Process groups, workspaces, shared memory and communication streams are made once and stay for as
long as somebody uses the session. Plans, executors and captured graphs come and go: the latest are
kept. So documents that change with every batch make new plans and nothing else.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from functools import cache
from threading import RLock
from typing import NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.question import Question
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.runtime.agreement.guard import Guard
from mesh_attention.runtime.agreement.handshake import Handshake
from mesh_attention.runtime.agreement.identity import (
    AgreedKind,
    BatchCount,
    BatchIdentity,
    Identity,
)
from mesh_attention.runtime.session.caches import NUM_CALLS, LruCache, Plans, PlanSource
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.calls import Calls
from mesh_attention.runtime.session.layouts import Shardings
from mesh_attention.runtime.session.prepared_call import PassReport
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.session.transports import Transports
from mesh_attention.runtime.transport.groups import Groups, is_registered
from mesh_attention.runtime.transport.interface import Counters
from mesh_attention.version import NEWEST_TORCH, OLDEST_TORCH, TESTED_TORCH

NUM_PLANS = 64  # kept, of each session
_NUM_LABELS = 4  # more than loaders are ahead
_NUM_SLOTS = 256

# A cache, not a setting: it never changes a result. Sessions of destroyed groups are dropped.
_SESSIONS: dict[dist.ProcessGroup, Session] = {}
_FINDING = RLock()  # two threads of one group must find the same


class Session:
    """Found with `session_of`. Groups and memory are released when the last `User` closes, and made
    anew when they are needed again."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        self.process = os.getpid()
        self.groups = Groups(parent)
        self._place = dist.get_rank(parent), len(self.groups.ranks)
        self.handshake = Handshake(self.groups)
        self.transports = Transports(self.groups)
        self.guard = Guard(self.groups, self.handshake, self._drop)
        self.calls = Calls(self.groups, self.handshake, self.guard, self.transports)
        self.batches = BatchCount()
        self.shardings = Shardings()
        # Slots of a rank in what any thread has cut.
        self.cut_slots: LruCache[int, None] = LruCache(_NUM_SLOTS)
        # Layouts that callers cut or number tensors by, by the bounds of their documents.
        self.asked_layouts: LruCache[tuple[int, ...], tuple[Layout, ...]] = LruCache(NUM_PLANS)
        # Those of the batches cut last: targets that are these, shifted again, are refused.
        self.labels = deque[ref[Tensor]](maxlen=_NUM_LABELS)
        self.plans = Plans(NUM_PLANS, *self._place)
        # What calls that say the sizes ask for, by their arguments.
        self.asked: LruCache[Hashable, tuple[PlanSource, CallOptions]] = LruCache(NUM_CALLS)
        self.function: User | None = None  # that stands for `mesh_attention()`
        # How many calls gathered a weight over these ranks, which may be more than the group's.
        self.gathered = Counter[tuple[int, ...]]()
        self.num_users = 0  # users that are open
        self._num_objects = 0  # users that ever joined

    # Plans.

    def source(self, asked: Question | Plan) -> PlanSource:
        """Plans for calls, as this rank sees them."""
        on_rank = RankPlan.on(asked, *self._place) if isinstance(asked, Plan) else asked
        return PlanSource(on_rank, self.plans.of)

    # Faults.

    def tell_of(self, error: BaseException, options: CallOptions) -> None:
        """Tell other ranks what has ended a call of this rank, unless all know it. Before calls are
        compared nothing has moved, but the others must not wait for us; where all fail alike, all
        objects stay usable."""
        alone = len(self.groups.ranks) == 1 or self.is_copy
        if not alone and not self.guard.is_known(error):
            if self.guard.compared or not isinstance(error, Exception):
                self.guard.break_off(error)
            else:
                try:
                    self.calls.agree({}, options, error)
                except Exception as raised:
                    if raised is not error:
                        self.guard.break_off(error)
        self.guard.left_by = None

    def refuse_other_thread(self) -> NoReturn:
        """A call that came while another thread was in one."""
        self.refuse_copies()  # in which that thread is not
        raise self.guard.cross()

    @property
    def is_copy(self) -> bool:
        """In a process that was forked: its connections are those of its parent."""
        return os.getpid() != self.process

    def refuse_copies(self) -> None:
        if self.is_copy:
            raise MeshAttentionError(
                f"this process was forked from process {self.process}, whose connections it "
                "shares, so it cannot communicate here: make such calls there, or start processes "
                "anew (multiprocessing's spawn) that make process groups of their own"
            )

    # Users.

    def join(self) -> User:
        self._num_objects += 1
        if self.num_users == 0:  # not where another thread, a loader say, makes one more
            self.batches.count_here()
        return User(self, self._num_objects)

    def user_of_function(self) -> User:
        if self.function is None:
            self.function = User(self, 0)
        return self.function

    def release_function(self) -> None:
        if self.function is not None:
            self.function.close()
            self.function = None
            self.asked.clear()

    def release(self) -> None:
        """Drop all that was made; what is needed again is made anew."""
        self.guard.rest()
        self._drop()
        self.plans.clear()

    def _drop(self) -> None:
        """All that calls hold, process groups last. What is in flight is broken off before: graphs
        cannot be given up while they run, and would wait for ranks that never come."""
        if self.guard.broken:
            self.groups.abort()
        self.calls.clear()
        self.transports.close(abandon=self.guard.broken)
        self.groups.close(abort=self.guard.broken)


class User:
    """A `ContextParallel` on a session, or all calls of `mesh_attention()`: it begins passes,
    counts bytes and may be closed. `number`: the same on all ranks."""

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.counters = defaultdict[Direction, Counters](Counters)  # bytes of its calls
        self.reports: dict[Direction, PassReport] = {}  # of its latest call with such a pass
        # Of its latest loss of each name: (kernel, why not, or "chosen"), in the order asked.
        self.loss_kernels: dict[str, tuple[tuple[str, str], ...]] = {}
        self._number = number
        self._closed = False
        session.num_users += 1

    def begin(
        self,
        kind: AgreedKind,
        name: str,
        options: CallOptions,
        device: torch.device,
        label: str | int | None = None,
        of: int = 0,
        *,
        sinks: bool = False,
        batch: BatchIdentity | None = None,
    ) -> None:
        """All ranks are about to make this pass, or none gets a result. `of`: the place of the
        forward call that a backward pass belongs to; `batch`: None is the latest."""
        session = self.session
        batch = batch or session.batches.current
        stream = session.transports.stream(device) if device.type == "cuda" else None
        identity = Identity(kind, name, self._number, repr(label), of, sinks, batch)
        session.batches.is_used = True
        session.guard.begin(identity, options.timeout, stream)
        session.calls.num_begun += 1
        kind.last_call = session.calls.num_begun

    def refuse_if_closed(self, *, sends: bool = True) -> None:
        """Raises also if the session is broken, or belongs to the process that this one was forked
        from, by whose connections nothing is sent."""
        session = self.session
        if sends and os.getpid() != session.process:
            session.refuse_copies()
        if self._closed:
            closed = MeshAttentionError("this ContextParallel is closed; make a new one")
            raise session.guard.known(closed)
        if not is_registered(session.groups.parent):
            destroyed = MeshAttentionError(
                "the process group of this call was destroyed (destroy_process_group); make a new "
                "group and a new ContextParallel on it"
            )
            raise session.guard.known(destroyed)
        session.guard.refuse_if_broken()

    def close(self) -> None:
        """Only this tells the session that a user is gone: garbage is collected at another time on
        each rank, and process groups must be released in the same order everywhere."""
        if not self._closed:
            self._closed = True
            if self.session.is_copy:
                return  # all that it holds is the parent's
            self.reports.clear()
            self.session.num_users -= 1
            if self.session.num_users == 0:
                self.session.release()


def session_of(parent: dist.ProcessGroup) -> Session:
    """The session of a process group, the same for all who ask."""
    with _FINDING:
        for group, session in [*_SESSIONS.items()]:
            if not is_registered(group) and not session.is_copy:
                del _SESSIONS[group]
                session.release_function()
                session.release()
        if parent in _SESSIONS:
            _SESSIONS[parent].refuse_copies()
        else:
            _warn_if_untested(torch.__version__)
            _SESSIONS[parent] = Session(parent)
        return _SESSIONS[parent]


@cache  # once in a process
def _warn_if_untested(version: str) -> None:
    major, minor, *_ = version.split(".")
    if not OLDEST_TORCH <= (int(major), int(minor)) <= NEWEST_TORCH:
        warnings.warn(
            f"mesh_attention is tested with {TESTED_TORCH}, and this is torch {version}: compare "
            "the loss of a batch with one process once, or take a tested version",
            stacklevel=2,
        )


def process_group(group_or_mesh: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise MeshAttentionError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            raise MeshAttentionError(
                f"the DeviceMesh has {group_or_mesh.ndim} dimensions "
                f"{group_or_mesh.mesh_dim_names}; pass one of them, as in mesh['cp']"
            )
        if group_or_mesh.get_coordinate() is not None:
            return group_or_mesh.get_group()
        raise MeshAttentionError("this rank is not a member of the DeviceMesh it was given")
    group = dist.group.WORLD if group_or_mesh is None else group_or_mesh
    if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0:
        return group
    # To ranks it leaves out, new_group gives this in place of a group.
    outside = dist.GroupMember.NON_GROUP_MEMBER
    if isinstance(group, dist.ProcessGroup) or (isinstance(group, int) and group == outside):
        raise MeshAttentionError("this rank is not a member of the group it was given")
    raise MeshAttentionError(
        f"the group is {group!r}; give a torch.distributed.ProcessGroup, a 1-D DeviceMesh, "
        "or None for the default group"
    )
