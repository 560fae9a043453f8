"""Buffers that hold this rank's tokens inside a block of `ContextParallel.context_parallel`
(`replaced_attention.py`), and their whole data again after it. Tensors that autograd saved in the
block keep the data of the block, so the backward pass may come after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.session.sharding import Shards


@contextmanager
def sharded_buffers(
    shards: Shards | None,
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    no_restore: Collection[Tensor],
) -> Iterator[None]:
    """Replaces the data of `buffers` inside the block. Call `check_buffers` before. `shards` is
    None only if there are no buffers."""
    parts = [
        _shard(shards, number, x, dim)
        for number, (x, dim) in enumerate(zip(buffers, dims, strict=True))
        if shards is not None
    ]
    restored = {id(x): x for x in buffers if not any(x is kept for kept in no_restore)}
    wholes = {name: x.data for name, x in restored.items()}
    last_versions: dict[int, int] = {}  # of the block's data, after the block

    # Autograd saves tensors, not their data: without hooks the backward pass would see a buffer's
    # whole data. With hooks autograd does not check versions of saved tensors, so `unpack` does.
    def pack(x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x.data if id(x) in restored else x, x, _version(x)

    def unpack(saved: tuple[Tensor, Tensor, int]) -> Tensor:
        data, x, expected = saved
        version = last_versions[id(x)] if id(x) in last_versions else _version(x)
        if version != expected:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(data.shape)} of {data.dtype} is at version {version}; "
                f"expected version {expected} instead"
            )
        return data

    try:
        for x, part in zip(buffers, parts, strict=True):
            x.data = part
        with saved_tensors_hooks(pack, unpack) if restored else nullcontext():
            yield
    finally:
        for name, x in restored.items():
            last_versions[name] = _version(x)
            x.data = wholes[name]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _shard(shards: Shards, number: int, x: Tensor, dim: int) -> Tensor:
    layout = shards.layout("q")
    if layout.padded_tokens != layout.num_tokens:
        raise MeshAttentionError(
            f"{layout.num_tokens} tokens do not divide evenly, and 0 would be put in place of "
            f"labels too; pad all buffers to {layout.padded_tokens} tokens, or use shard_batch, "
            "which takes any length"
        )
    try:
        return shards.shard(x, dim, "q").contiguous()
    except MeshAttentionError as error:
        raise MeshAttentionError(f"buffers[{number}]: {error}") from None


def check_buffers(
    buffers: Sequence[Tensor], dims: Sequence[int], no_restore: Collection[Tensor]
) -> None:
    for name, value in (("buffers", buffers), ("buffer_seq_dims", dims)):
        if not isinstance(value, list | tuple):
            raise MeshAttentionError(f"{name} is {type(value).__name__}; it must be a list")
    if not isinstance(no_restore, set | frozenset | list | tuple):
        raise MeshAttentionError(
            f"no_restore_buffers is {type(no_restore).__name__}; it must be a set or a list"
        )
    if len(buffers) != len(dims):
        raise MeshAttentionError(
            f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims: give one for each"
        )
    for number, x in enumerate(buffers):
        name = f"buffers[{number}]"
        raise_fault(fault_of_kind(**{name: x}))
        if x.requires_grad:
            raise MeshAttentionError(
                f"{name} requires a gradient, which a buffer in place cannot have; use "
                "shard(x, dim), which is differentiable"
            )
        if any(x is other for other in buffers[:number]):
            raise MeshAttentionError(f"{name} is given twice")
        if isinstance(dims[number], bool) or not isinstance(dims[number], int):
            raise MeshAttentionError(f"buffer_seq_dims[{number}]={dims[number]!r}: must be an int")
        if not -x.ndim <= dims[number] < x.ndim:
            raise MeshAttentionError(
                f"buffer_seq_dims[{number}]={dims[number]} is outside a tensor of {x.ndim} "
                "dimensions"
            )
    if any(not any(x is kept for x in buffers) for kept in no_restore):
        raise MeshAttentionError("no_restore_buffers has a tensor that is not among the buffers")
