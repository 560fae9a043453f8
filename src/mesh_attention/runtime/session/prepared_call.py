"""A prepared call: a plan on tensors of one shape, made ready once and run many times.

Whoever holds a call can run it. The session keeps the latest kinds; an autograd graph holds the
call it was made by, so its backward pass runs although the session has long dropped that kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from weakref import finalize, ref

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.agreement.identity import AgreedKind
from mesh_attention.runtime.device import PassMemory, WorkspaceBlock, current_stream
from mesh_attention.runtime.execute.call_masks import KnownRanges
from mesh_attention.runtime.execute.executor import CallShape, Executor, nvtx_span, run_to_end
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.session.transports import CallTransport, TransportName, Transports
from mesh_attention.runtime.transport.interface import Counters


class AgreedPasses:
    """What ranks have agreed on for one kind of call. `agreed`: by whether gradients are needed;
    `is_kept`: whether the session keeps the kind, so that ranks take it for known."""

    def __init__(self) -> None:
        self.agreed: dict[bool, AgreedKind] = {}
        self.is_kept = False


class PassReport:
    """What one pass of a call is made with, for people. It outlives the call, and keeps neither its
    masks nor its memory. `kernels`: which were asked, and why one was chosen, by kind of block."""

    def __init__(self, executor: Executor, transport: CallTransport) -> None:
        self.transport = transport
        self.kernels = {str(kind): choice.reasons for kind, choice in executor.choices.items()}
        self.kernels["calls"] = (("predicted", executor.call_summary),)
        self.kernels["rows"] = executor.frame.row_choice.reasons
        self._executor = ref(executor)
        self._without_masks = PassMemory(
            executor.workspace_bytes, executor.scratch_bytes, kept_bytes=executor.frame.kept_bytes
        )

    @property
    def memory(self) -> PassMemory:
        executor = self._executor()
        return self._without_masks if executor is None else executor.memory


class PreparedCall:
    """`Calls` makes it and says when ranks have agreed; the operators run it."""

    def __init__(
        self,
        transports: Transports,
        rank_plan: RankPlan,
        options: CallOptions,
        call_shape: CallShape,
        base: PreparedCall | None = None,
        kind: AgreedPasses | None = None,
    ) -> None:
        """`base`: of a plan with the same programs, for any mask; `kind`: that of other calls which
        ranks take for alike."""
        if not options.return_lse:
            rank_plan = rank_plan.without_lse
        # Signals between blocks of shared memory have not been captured; NCCL's operations are.
        wanted = TransportName.DISTRIBUTED if options.cuda_graph else options.transport
        if base is None:
            made = CallTransport(transports, wanted, rank_plan, call_shape, options.timeout)
        self.transport: CallTransport = made if base is None else base.transport
        self.kind = kind or AgreedPasses()
        self.to_be_refused = False  # ranks are known to differ
        self.options = options
        self.rank_plan = rank_plan
        self.reports: dict[Direction, PassReport] = {}
        self._base = base
        self._call_shape = call_shape
        self._on_cuda = call_shape.device.type == "cuda"
        self.executors: dict[Direction, Executor] = {}
        self._known_ranges: KnownRanges = {}
        self._made: torch.cuda.Event | None = None
        self._last_stream: list[torch.cuda.Stream] = []
        self._captured: dict[Direction, CapturedCall] = {}

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The passes that all ranks have agreed on."""
        return tuple(Direction) if True in self.kind.agreed else (Direction.FORWARD,)

    def is_warm(self, needs_grad: bool) -> bool:
        """Whether ranks know such calls and this rank has all it needs for one."""
        kind = self.kind
        ready = Direction.BACKWARD if needs_grad else Direction.FORWARD
        known = kind.is_kept and needs_grad in kind.agreed and ready in self.executors
        return known or self.to_be_refused

    def refused(self, needs_grad: bool, kind: AgreedKind) -> PreparedCall:
        """The same for ranks that are known to differ: they compare it once, when it begins, and
        refuse it. It is not connected."""
        other = copy(self)
        other.kind, other.to_be_refused = AgreedPasses(), True
        other.kind.agreed[needs_grad] = kind
        return other

    def make_ready(self, directions: Iterable[Direction]) -> None:
        """Raises where a kernel refuses what this rank has to do."""
        for direction in directions:
            if direction not in self.executors:
                self.executors[direction] = executor = self._executor(direction)
                self.reports[direction] = PassReport(executor, self.transport)

    def make_kernels_ready(self) -> None:
        """What a kernel makes of a mask for a backward pass may serve the forward pass too."""
        for direction in reversed(Direction):
            if direction in self.executors:
                self.executors[direction].attentions.prepare_kernels()

    def was_made_on(self, stream: torch.cuda.Stream, retired: Retired) -> None:
        """This call was made ready on another stream: its first run waits for that, and what was
        made there stays until its last run is over."""
        self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._made.record(stream)
        finalize(self, _retire, retired, self._known_ranges, self._last_stream)

    def _executor(self, direction: Direction) -> Executor:
        plan, rank = self.rank_plan.plan, self.rank_plan.rank
        if self._base is not None:
            self._base.make_ready((direction,))
            executor = self._base.executors[direction]
            return executor.for_mask(plan, self._known_ranges, by_mask=self.rank_plan.by_mask)
        return make_executor(
            plan,
            plan.direction(direction),
            rank,
            self.transport.make(direction),
            self.transport.workspace,
            self._call_shape,
            self.options,
            trace=nvtx_span if self.options.nvtx and self._on_cuda else None,
            known_ranges=self._known_ranges,
        )

    def reserve(self) -> None:
        """A graph replays on the memory it was captured with, so that must not grow later."""
        if not self._on_cuda:
            device = self._call_shape.device.type
            raise MeshAttentionError(f"cuda_graph=True needs CUDA tensors, not {device} ones")
        most = max(executor.workspace_bytes for executor in self.executors.values())
        self.transport.workspace.take(most, self._call_shape.device)

    def run(
        self, direction: Direction, inputs: Mapping[str, Tensor], counters: Counters
    ) -> dict[str, Tensor]:
        """`counters`: of whoever makes the call."""
        executor = self.executors[direction]
        executor.counters = counters
        if self._made is not None:
            stream = torch.cuda.current_stream(self._call_shape.device)
            stream.wait_event(self._made)
            self._last_stream[:] = [stream]
        # Triton launches on the current device, which need not be that of the tensors.
        with torch.cuda.device(self._call_shape.device) if self._on_cuda else nullcontext():
            if self.options.cuda_graph:
                return self._replay(direction, executor, inputs)
            return run_to_end(executor.run(inputs))

    def _replay(
        self, direction: Direction, executor: Executor, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if direction not in self._captured:
            workspace, stream = self.transport.workspace, self.transport.stream
            assert stream is not None  # `reserve` refuses other devices
            block = workspace.take(executor.workspace_bytes, self._call_shape.device)
            self._captured[direction] = CapturedCall(
                lambda static: run_to_end(executor.run(static)), inputs, block, stream
            )
        return self._captured[direction](inputs)

    def clear(self) -> None:
        """Before the process groups go: graphs hold on to communicators."""
        self._captured.clear()
        self.executors.clear()


# What calls that are gone may still be reading on the device, with an event that says when not.
Retired = deque[tuple[torch.cuda.Event, KnownRanges]]


def _retire(retired: Retired, ranges: KnownRanges, last_stream: list[torch.cuda.Stream]) -> None:
    for stream in last_stream:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        retired.append((event, ranges))


class CapturedCall:
    """A whole call as a CUDA graph: inputs are copied in, the graph is replayed, results copied
    out. So the host's cost of a call does not depend on the number of its operations. What is
    captured must live on streams alone: NCCL does, gloo does not.

    `block` is the workspace that it was captured on: it must stay for as long as the graph is
    replayed. `stream` is that of communications: graphs hold some, on the communicators that calls
    outside of graphs use, and NCCL wants all that one of them does in one order.
    """

    def __init__(
        self,
        call: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        inputs: Mapping[str, Tensor],
        block: WorkspaceBlock,
        stream: torch.cuda.Stream,
    ) -> None:
        self._stream = stream
        self._inputs = {name: x.clone() for name, x in inputs.items()}
        self._block = block
        call(self._inputs)  # kernels are compiled and connections made outside the capture
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on using CUDA meanwhile; NCCL's own does.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = call(self._inputs)

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self._block.in_use():
            for name, x in self._inputs.items():
                x.copy_(inputs[name])
            current = current_stream(self._stream.device)
            current.wait_stream(self._stream)
            self._graph.replay()
            self._stream.wait_stream(current)
            return {name: x.clone() for name, x in self._outputs.items()}


class PrefetchStreams:
    """Streams on which calls are made ready while others compute.

    Kernels that make a plan of a mask read sizes back to the host, which on the compute stream
    would wait for all that came before. Memory that was made on a stream is given out there again
    as soon as it is let go: so what a call reads is held until its last run is over, wherever that
    was.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._retired: Retired = deque()

    @contextmanager
    def making(self, call: PreparedCall, device: torch.device) -> Iterator[None]:
        """Around what makes a call ready, in a thread of its own."""
        if device.type != "cuda":
            yield
            return
        while self._retired and self._retired[0][0].query():  # type: ignore[no-untyped-call]
            self._retired.popleft()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
        call.was_made_on(stream, self._retired)
