"""The ways in which `document_steps.py` runs its steps: those of the library, and PyTorch's."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel

Starts = tuple[int, ...]
Tensors = tuple[Tensor, ...]  # q, k, v and the gradient of out: (1, tokens, heads, head_dim)

CHOSEN, AHEAD, TORCH = "chosen", "chosen, prefetched", "PyTorch all-gather"


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
