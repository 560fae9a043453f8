"""What one rank does in `documents_over_links.py`: steps with new documents, in several ways.

A step is all that a new batch costs: documents, plan, cutting the tensors, forward and backward.
Every way is compared with float64 on two batches first; a wrong one ends the run. What a rank has
measured is its stdout, as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import wire_bytes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel, register_kernel
from mesh_attention.kernels.blockwise import Blockwise

Starts = tuple[int, ...]
Tensors = tuple[Tensor, ...]  # q, k, v and the gradient of out: (1, tokens, heads, head_dim)

LIMIT = 2e-6  # relative error in float32
CHOSEN, AHEAD, TORCH = "chosen", "chosen, prefetched", "PyTorch all-gather"


class SmallBlocks(Blockwise):
    """Skips what is hidden in blocks as small as a GPU's kernels have. With the library's own, made
    for few large calls, a ring would compute nearly all pairs, and not its links would be
    measured."""

    name = "small_blocks"

    def __init__(self) -> None:
        super().__init__(query_block=128, key_block=128)


@dataclass(frozen=True)
class Sizes:
    tokens: int
    documents: int
    heads: int
    kv_heads: int
    dim: int
    seed: int

    def starts(self, number: int) -> Starts:
        """Of batch `number`: log-normal lengths that add up to all tokens."""
        chance = random.Random(f"{self.seed} {number}")
        lengths = [chance.lognormvariate(0.0, 1.0) for _ in range(self.documents)]
        cuts, whole = [0.0], sum(lengths)
        for length in lengths:
            cuts.append(cuts[-1] + length / whole * self.tokens)
        return tuple(round(cut) for cut in cuts)

    def tensors(self) -> Tensors:
        """The same on all ranks."""
        chance = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(torch.randn(1, self.tokens, h, self.dim, generator=chance) for h in heads)


@dataclass
class Step:
    """`plan` until the call could begin, `seconds` all of it; `cpu`: of all threads of the process,
    `plan_cpu` of planning alone. Bytes: of the tensors that it handed to the transport (None where
    that is not ours), and of all that its link carried."""

    way: str
    batch: int
    seconds: float
    plan: float
    plan_cpu: float
    cpu: float
    sent: int | None
    wire_received: int
    wire_sent: int


class Way:
    """One way to run the steps. `run` gives out and gradients of this rank's tokens, `cut` its
    tokens of a whole tensor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def batches(self, packs: Sequence[Starts]) -> Generator[Any, None, None]:
        """For each batch what `run` needs; asking for the next one is planning."""
        yield from packs

    def run(self, batch: Any, whole: Tensors) -> list[Tensor]:
        raise NotImplementedError

    def cut(self, batch: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def sent(self) -> int | None:
        """Bytes so far."""
        return None

    def reason(self, batch: Any) -> str:
        return ""


class LibraryWay(Way):
    def __init__(self, name: str, sizes: Sizes, ranks_per_node: int) -> None:
        super().__init__(name)
        self._ahead = name == AHEAD
        words = [] if name in (CHOSEN, AHEAD) else name.split()  # a method and its options
        options: dict[str, Any] = {w.partition("=")[0]: w.partition("=")[2] for w in words[1:]}
        self._cp = ContextParallel(
            seq_len=sizes.tokens,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.dim,
            causal=True,
            dtype=torch.float32,
            method=words[0] if words else None,
            ranks_per_node=ranks_per_node,
            **options,
        )

    def batches(self, packs: Sequence[Starts]) -> Generator[Any, None, None]:
        if self._ahead:
            for _, documents in self._cp.prefetch(packs, lambda pack: pack):
                yield documents
            return
        before = None
        for pack in packs:
            documents = self._cp.documents(pack)
            if before is not None:  # as the call would, so that it is measured apart
                documents.make_ready_like(before)
            yield documents
            before = documents

    def run(self, batch: Any, whole: Tensors) -> list[Tensor]:
        q, k, v, grad = (self.cut(batch, x) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = self._cp.attention(*leaves, documents=batch)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def cut(self, batch: Any, x: Tensor) -> Tensor:
        return self._cp.shard(x, 1, documents=batch)

    def sent(self) -> int | None:
        return sum(counters.total.sent_bytes for counters in self._cp.traffic.values())

    def reason(self, batch: Any) -> str:
        return repr(batch)


class TorchWay(Way):
    """What PyTorch's context parallelism does for `flex_attention`, the one of its ways that takes
    documents: its own operation gathers all K and V and reduces their gradients. FlexAttention has
    no backward pass on CPUs, so each rank then attends document by document with SDPA."""

    def __init__(self, name: str) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops

        super().__init__(name)
        self._gather = _cp_custom_ops.flex_cp_allgather
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD.group_name

    def run(self, batch: Any, whole: Tensors) -> list[Tensor]:
        q, k, v, grad = (self.cut(batch, x).clone() for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        all_k, all_v = self._gather(k, v, 1, self._group)
        out = torch.cat([*self._outs(batch, q, all_k, all_v)], 1)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def _outs(self, starts: Starts, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Tensor]:
        begin = self._rank * q.shape[1]
        for a, b in pairwise(starts):
            first, last = max(a, begin), min(b, begin + q.shape[1])
            if first < last:
                rows, keys = torch.arange(first, last)[:, None], torch.arange(a, last)
                yield scaled_dot_product_attention(
                    q[:, first - begin : last - begin].transpose(1, 2),
                    k[:, a:last].transpose(1, 2),
                    v[:, a:last].transpose(1, 2),
                    attn_mask=keys <= rows,
                    enable_gqa=True,
                ).transpose(1, 2)

    def cut(self, batch: Any, x: Tensor) -> Tensor:
        return x.tensor_split(self._size, 1)[self._rank]


def what_flex_attention_says() -> str:
    """PyTorch's context parallelism for documents as it is, on a small batch: its own error."""
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Flex(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=mask)

    rank, size = dist.get_rank(), dist.get_world_size()
    document = torch.arange(size * 128) // 200

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + rank * 128 >= j) & (document[i + rank * 128] == document[j])

    mask = create_block_mask(seen, 1, 1, 128, size * 128, device="cpu")
    module = Flex()
    style = _attention._ContextParallel(2, _attention._ContextParallel.AttentionType.FLEX)
    style._apply(module, init_device_mesh("cpu", (size,)))
    try:
        module(*(torch.ones(1, 2, 128, 16, requires_grad=True) for _ in range(3))).sum().backward()
    except NotImplementedError as error:
        return f"{type(error).__name__}: {error}"
    return "runs"


# Exactness.


def truth(starts: Starts, whole: Tensors) -> list[Tensor]:
    """Out and gradients in float64, document after document."""
    *leaves, grad = (x.double() for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    outs = []
    for a, b in pairwise(starts):
        q, k, v = (x[:, a:b].transpose(1, 2) for x in leaves)
        outs.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    out = torch.cat(outs, 2).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def gate(way: Way, packs: Sequence[Starts], whole: Tensors, folder: Path) -> tuple[float, str]:
    """The largest relative error on this rank, and what was chosen; raises if it is too large."""
    worst, reason = 0.0, ""
    for pack, batch in zip(packs, way.batches(packs), strict=True):
        wanted = torch.load(folder / f"{hash(pack)}.pt")
        for a, b in zip(way.run(batch, whole), wanted, strict=True):
            mine = way.cut(batch, b)
            worst = max(worst, float((a.double() - mine).norm() / mine.norm()))
        reason = way.reason(batch)
    if not worst < LIMIT:
        raise SystemExit(f"wrong: {way.name} differs from float64 by {worst:.1e}, relatively")
    return worst, reason


# Steps.


def measure(way: Way, first: int, packs: Sequence[Starts], whole: Tensors) -> list[Step]:
    found = []
    batches = way.batches(packs)
    for number in range(first, first + len(packs)):
        dist.barrier()
        sent, wire, cpu = way.sent(), wire_bytes(), time.process_time()
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        batch = next(batches)
        planned, planned_cpu = time.perf_counter(), time.thread_time()
        way.run(batch, whole)
        ended, ended_cpu, after = time.perf_counter(), time.process_time(), way.sent()
        dist.barrier()  # until then some bytes are in a queue of the link
        wire_after = wire_bytes()
        found.append(
            Step(
                *(way.name, number, ended - begun, planned - begun, planned_cpu - begun_cpu),
                cpu=ended_cpu - cpu,
                sent=None if after is None or sent is None else after - sent,
                wire_received=wire_after[0] - wire[0],
                wire_sent=wire_after[1] - wire[1],
            )
        )
    batches.close()
    return found


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("given", type=json.loads)
    given: dict[str, Any] = parser.parse_args().given
    sizes, folder = Sizes(**given["sizes"]), Path(given["folder"])
    rounds, steps = given["rounds"], given["steps"]
    torch.set_num_threads(1)
    register_kernel(SmallBlocks(), before=Blockwise.name)
    dist.init_process_group("gloo")
    whole = sizes.tensors()
    checked = [sizes.starts(-1), sizes.starts(-2)]
    if dist.get_rank() == 0:
        say("float64 truth of two batches")
        for pack in checked:
            torch.save(truth(pack, whole), folder / f"{hash(pack)}.pt")
    dist.barrier()
    ways = [
        TorchWay(name) if name == TORCH else LibraryWay(name, sizes, given["ranks_per_node"])
        for name in given["ways"]
    ]
    errors, reasons = {}, {}
    for way in ways:
        errors[way.name], reasons[way.name] = gate(way, checked, whole, folder)
        say(f"exact to {errors[way.name]:.0e}: {way.name}  {reasons[way.name]}")
    flex = what_flex_attention_says()
    found: list[Step] = []
    for turn in range(rounds):
        packs = [sizes.starts(number) for number in range(turn * steps, (turn + 1) * steps)]
        for way in ways:
            mine = measure(way, turn * steps, packs, whole)
            typical = sorted(step.seconds for step in mine)[steps // 2]
            say(f"round {turn + 1} of {rounds}  {way.name}: about {typical * 1e3:.0f} ms a step")
            found += mine
    dist.barrier()
    told = {"errors": errors, "reasons": reasons, "flex": flex}
    print(json.dumps(told | {"steps": [asdict(step) for step in found]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
