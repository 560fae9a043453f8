"""One rank of a training step on the GPU at hand, with stand-ins for what travels.

Real: blocks (RMSNorm, GQA with rotations, SwiGLU), attention's kernels on a rank's program, the
checkpoint policy with its copies to the host, tiles, the chunked loss, AdamW in fp32 on this rank's
shard of all parameters. Stand-ins, which last as long as the cluster model says and take SMs as
NCCL does: attention's transfers, gathers of a block's parameters (one block ahead), reductions of
its gradients. Gradients of a block are cast to fp32 as FSDP2 does before it reduces them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from one_rank import timing_events
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.seconds import GroupShape, ring_seconds
from mesh_attention.plan.language.plan import Direction
from mesh_attention.request.kept_calls import THREAD
from mesh_attention.runtime.device import Marks, Workspace
from mesh_attention.runtime.execute.executor import Executor, run_to_end
from mesh_attention.step.costs import Keeps
from mesh_attention.step.model_shapes import ModelShape
from mesh_attention.step.splits import PlannedStep
from replay.hold import CudaHolder, Mode
from replay.measure import executor_of
from replay.rank import rank_to_replay

SMS = 16


class AttentionOfRank:
    """A rank's two programs, on one workspace."""

    def __init__(self, step: PlannedStep, cluster: Cluster, device: torch.device) -> None:
        self._holder = CudaHolder(device, SMS)
        workspace = Workspace()
        self._executors: dict[Direction, Executor] = {}
        for direction in Direction:
            part = rank_to_replay(step.attention.choice.timeline(direction))
            executor = executor_of(part, cluster.links, self._holder, workspace, device)
            self._executors[direction] = executor
            self.rank = part.rank
        kinds = (executor.choices.values() for executor in self._executors.values())
        self.kernels = sorted({choice.kernel.name for choices in kinds for choice in choices})

    def set_mode(self, mode: Mode) -> None:
        self._holder.mode = mode

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
        """Returns what attention's operator does: contexts that keep its results call this."""
        inputs = {name: x.transpose(0, 1) for name, x in zip("qkv", (q, k, v), strict=True)}
        results = run_to_end(self._executors[Direction.FORWARD].run(inputs))
        place = torch.zeros(1, dtype=torch.int64)
        return results["out"].transpose(0, 1), results["lse"], place, []

    def backward(self, saved: tuple[Tensor, ...], grad_out: Tensor) -> list[Tensor]:
        names = ("q", "k", "v", "out", "grad_out")
        rows = (*saved[:4], grad_out.contiguous())
        inputs = {name: x.transpose(0, 1) for name, x in zip(names, rows, strict=True)}
        inputs["lse"] = saved[4]
        results = run_to_end(self._executors[Direction.BACKWARD].run(inputs))
        return [results[f"grad_{name}"].transpose(0, 1) for name in "qkv"]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: AttentionOfRank) -> Tensor:
        # Places 7 and 10 of the operator's inputs are its call and whether gradients are needed.
        inputs = (q, k, v, *(None,) * 4, rank, None, None, None)
        around = THREAD.innermost
        results = rank.forward(*inputs) if around is None else around.attend(rank.forward, inputs)
        out, lse, _, _ = results
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rank = rank
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*ctx.rank.backward(ctx.saved_tensors, grads[0]), None)


class Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate, self.up = (_linear(shape.hidden, shape.intermediate) for _ in range(2))
        self.down = _linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(
        self, shape: ModelShape, attention: AttentionOfRank, tiled: Callable[[Mlp], Any]
    ) -> None:
        super().__init__()
        self._shape, self._attention = shape, attention
        self.q, self.k, self.v = (
            _linear(shape.hidden, width)
            for width in (shape.q_width, shape.kv_width, shape.kv_width)
        )
        self.o = _linear(shape.q_width, shape.hidden)
        self.norms = nn.ParameterList(torch.ones(shape.hidden, dtype=torch.bfloat16) for _ in "ab")
        self.qk_norms = nn.ParameterList(
            torch.ones(shape.head_dim, dtype=torch.bfloat16) for _ in range(2 * shape.qk_norm)
        )
        self.mlp = Mlp(shape)
        self._run_mlp = tiled(self.mlp)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, dim = self._shape, self._shape.head_dim
        y = functional.rms_norm(x, (shape.hidden,), self.norms[0], 1e-6)
        q, k, v = (part(y).unflatten(-1, (-1, dim)) for part in (self.q, self.k, self.v))
        if shape.qk_norm:
            q, k = (
                functional.rms_norm(part, (dim,), norm, 1e-6)
                for part, norm in zip((q, k), self.qk_norms, strict=True)
            )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        out = _Attention.apply(q, k, v.contiguous(), self._attention)  # type: ignore[no-untyped-call]
        x = x + self.o(out.flatten(-2))
        y = functional.rms_norm(x, (shape.hidden,), self.norms[1], 1e-6)
        return x + self._run_mlp(y)  # type: ignore[no-any-return]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device="cuda")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Sharding:
    """FSDP2's part: gathers one block ahead, gradients in fp32, reductions."""

    def __init__(
        self, blocks: list[Block], step: PlannedStep, cluster: Cluster, device: Any
    ) -> None:
        ranks, links = step.asked.num_ranks, cluster.links
        group = GroupShape.of(links, tuple(range(ranks)))
        shard = -(-step.asked.model.block_parameters // ranks)
        self._holders = [CudaHolder(device, SMS) for _ in range(2)]
        # Parameters have 2 bytes, gradients 4.
        self._gather = self._holders[0].prepare((), ring_seconds(links, group, 2 * shard))
        self._reduce = self._holders[1].prepare((), ring_seconds(links, group, 4 * shard))
        self._gathered: dict[int, Any] = {}
        self._reducing: Any = None
        self._count = len(blocks)
        self.goes_back = False
        self.shard_gradient = torch.zeros(shard, device=device)
        for block in blocks:
            self._watch([*block.parameters()])

    def set_mode(self, mode: Mode) -> None:
        for holder in self._holders:
            holder.mode = mode

    def enter(self, number: int) -> None:
        """Before a block is computed, forward or again; the next one is gathered meanwhile."""
        after = number - 1 if self.goes_back else number + 1
        for index in (number, after):
            if 0 <= index < self._count and index not in self._gathered:
                self._gathered[index] = self._gather(_mark())
        self._gathered.pop(number).wait()

    def _watch(self, parameters: list[nn.Parameter]) -> None:
        left = len(parameters)

        def accumulated(_: Tensor) -> None:
            nonlocal left
            left -= 1
            if not left:
                left = len(parameters)
                self._reduced(parameters)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def _reduced(self, parameters: list[nn.Parameter]) -> None:
        flat = torch.cat([p.grad.float().flatten() for p in parameters if p.grad is not None])
        for parameter in parameters:
            parameter.grad = None
        if self._reducing is not None:
            self._reducing.wait()
        self._reducing = self._reduce(_mark())
        part = flat[: self.shard_gradient.numel()]
        self.shard_gradient[: part.numel()].add_(part)

    def finish(self) -> None:
        if self._reducing is not None:
            self._reducing.wait()
        self._reducing = None
        self._gathered.clear()


def _mark() -> Marks:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return (event,)


@dataclass
class Measured:
    """Seconds of one step, of the layers that ran."""

    total: float
    forward: list[float]  # by layer
    backward: list[float]
    embedding: float
    loss: float
    optimizer: float
    rest: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)


class ReplayedStep:
    def __init__(
        self, step: PlannedStep, cluster: Cluster, layers: int, cp: ContextParallel
    ) -> None:
        self.step, self._cp = step, cp
        device = torch.device("cuda", torch.cuda.current_device())
        shape, policy = step.asked.model, step.policy
        self.tokens = step.attention.local_tokens
        self.attention = AttentionOfRank(step, cluster, device)

        def tiled(mlp: Mlp) -> Any:
            return cp.tiled(mlp, tokens=policy.tile_tokens) if policy.tile_tokens else mlp

        with torch.device(device):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, dtype=torch.bfloat16)
            self.blocks = [Block(shape, self.attention, tiled) for _ in range(layers)]
            self.head = _linear(shape.hidden, shape.vocabulary)
            self.norm = nn.Parameter(torch.ones(shape.hidden, dtype=torch.bfloat16))
            self.tokens_in = torch.randint(shape.vocabulary, (1, self.tokens))
            self.labels = torch.randint(shape.vocabulary, (1, self.tokens))
            angles = torch.outer(
                torch.arange(self.tokens) * 1.0,
                1e6 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim),
            )[None, :, None]
            self.rotation = angles.cos().bfloat16(), angles.sin().bfloat16()
            # Weights, gradients and both moments of this rank's shard of all parameters.
            shard = -(-shape.parameters // step.asked.num_ranks)
            self.shard = nn.Parameter(torch.randn(shard) * 0.02)
            self.shard.grad = torch.zeros(shard)
        self.optimizer = torch.optim.AdamW([self.shard], lr=1e-4, fused=True)
        self.sharding = Sharding(self.blocks, step, cluster, device)
        offload = policy.keeps is Keeps.HOST
        self.keep = cp.keep_attention(offload=offload) if policy.keeps_attention else None

    def set_mode(self, mode: Mode) -> None:
        self.attention.set_mode(mode)
        self.sharding.set_mode(mode)

    def run(self) -> Measured:
        """One step; a first one compiles kernels and makes memory."""
        torch.cuda.reset_peak_memory_stats()
        count = len(self.blocks)
        marks: dict[Any, Any] = {}

        def mark(name: Any) -> None:
            marks[name] = timing_events()[0]
            marks[name].record()

        def block(number: int, x: Tensor) -> Tensor:
            self.sharding.enter(number)
            result: Tensor = self.blocks[number](x, *self.rotation)
            return result

        self.sharding.goes_back = False
        torch.cuda.synchronize()
        begun = time.perf_counter()
        mark("begin")
        x = self.embedding(self.tokens_in)
        for number in range(count):
            mark(("forward", number))
            x.register_hook(lambda _, number=number: mark(("backward", number)))
            if self.step.policy.keeps is Keeps.EVERYTHING:
                x = block(number, x)
            else:
                extra: Any = {} if self.keep is None else {"context_fn": self.keep}
                x = checkpoint(block, number, x, use_reentrant=False, **extra)
        mark(("forward", count))
        x.register_hook(lambda _: mark(("backward", count)))
        y = functional.rms_norm(x, (x.shape[-1],), self.norm, 1e-6)
        del x
        loss = self._cp.linear_cross_entropy(y, self.head.weight, self.labels, reduce="sum").loss
        del y
        self.sharding.goes_back = True
        loss.backward()  # type: ignore[no-untyped-call]
        self.sharding.finish()
        for parameter in (self.embedding.weight, self.head.weight, self.norm):
            parameter.grad = None
        mark("gradients")
        self.optimizer.step()
        mark("end")
        torch.cuda.synchronize()
        wall = time.perf_counter() - begun

        def between(first: Any, last: Any) -> float:
            return float(marks[first].elapsed_time(marks[last])) * 1e-3

        if not torch.isfinite(loss):
            raise AssertionError(f"the loss is {loss}")
        stats = torch.cuda.memory_stats()
        host = 0 if self.keep is None or self.keep.host is None else self.keep.host.most_bytes
        return Measured(
            total=wall,
            forward=[between(("forward", i), ("forward", i + 1)) for i in range(count)],
            backward=[between(("backward", i + 1), ("backward", i)) for i in range(count)],
            embedding=between("begin", ("forward", 0)),
            loss=between(("forward", count), ("backward", count)),
            optimizer=between("gradients", "end"),
            rest=between(("backward", 0), "gradients"),
            memory={
                "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
                "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
                "host_bytes": host,
            },
        )
