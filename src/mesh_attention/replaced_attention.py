"""`scaled_dot_product_attention` over all ranks inside a block, for model code that stays as it is,
with the buffers convention of PyTorch's own `context_parallel`.

A torch function mode finds the calls however a model imported the name. Buffers get other data for
the block. What autograd has saved of them keeps that data, so backward may come after the block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.documents import Documents
from mesh_attention.sharded_batch import Sharder
from mesh_attention.tensor_faults import fault_of_kind, fault_of_unsupported


class Attending(Sharder, Protocol):
    """What is asked of a `ContextParallel`; `fault` is raised by all ranks."""

    @property
    def _length_is_known(self) -> bool: ...

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fault: MeshAttentionError | None,
        *,
        documents: Documents | None = None,
        softmax_scale: float | None = None,
        is_causal: bool | None = None,
    ) -> tuple[Tensor, Tensor]: ...


@contextmanager
def replaced_attention(
    cp: Attending,
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    no_restore: Collection[Tensor],
    documents: Documents | None,
) -> Iterator[Documents | None]:
    _check_buffers(buffers, dims, no_restore)
    if buffers and documents is None and not cp._length_is_known:
        documents = cp.documents([0, buffers[0].shape[dims[0]]])
    shards = [
        _shard(cp, number, x, dim, documents)
        for number, (x, dim) in enumerate(zip(buffers, dims, strict=True))
    ]
    restored = [_Buffer(x) for x in buffers if not any(x is kept for kept in no_restore)]
    for x, shard in zip(buffers, shards, strict=True):
        x.data = shard
    try:
        with _keeping(restored) if restored else nullcontext(), _OverRanks(cp, documents):
            yield documents
    finally:
        for buffer in restored:
            buffer.restore()


# Buffers.


class _Buffer:
    """A tensor that has other data until it is restored."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._whole = tensor, tensor.data
        self._last_version: int | None = None

    @property
    def version(self) -> int:
        """Of the data in the block."""
        return _version(self.tensor) if self._last_version is None else self._last_version

    def restore(self) -> None:
        self._last_version = _version(self.tensor)
        self.tensor.data = self._whole


def _keeping(buffers: list[_Buffer]) -> saved_tensors_hooks:
    """Autograd saves tensors, not their data: a buffer would bring its whole data to backward.

    It asks whether a saved tensor was changed only where there are no hooks, so we ask here.
    """
    by_id = {id(buffer.tensor): buffer for buffer in buffers}

    def pack(x: Tensor) -> tuple[Tensor, Callable[[], int], int]:
        buffer = by_id.get(id(x))
        if buffer is not None:
            return x.data, lambda: buffer.version, buffer.version
        return x, lambda: _version(x), _version(x)

    def unpack(saved: tuple[Tensor, Callable[[], int], int]) -> Tensor:
        x, version, then = saved
        if version() != then:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(x.shape)} of {x.dtype} is at version {version()}; "
                f"expected version {then} instead"
            )
        return x

    return saved_tensors_hooks(pack, unpack)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _shard(cp: Attending, number: int, x: Tensor, dim: int, documents: Documents | None) -> Tensor:
    shards = cp._shards(documents)
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


def _check_buffers(
    buffers: Sequence[Tensor], dims: Sequence[int], no_restore: Collection[Tensor]
) -> None:
    if len(buffers) != len(dims):
        raise MeshAttentionError(
            f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims: give one for each"
        )
    for number, x in enumerate(buffers):
        name = f"buffers[{number}]"
        fault = fault_of_kind(**{name: x})
        if fault is not None:
            raise fault
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


# Calls.

# They attend without a call of scaled_dot_product_attention that could be seen from here.
_WHOLE_LAYERS = tuple(
    getattr(home, name)
    for home, name in (
        (functional, "multi_head_attention_forward"),
        (torch, "_native_multi_head_attention"),
        (torch, "_transformer_encoder_layer_fwd"),
    )
    if hasattr(home, name)
)


class _OverRanks(TorchFunctionMode):
    """Of this thread; PyTorch's threads of a backward pass have the modes of who called it."""

    def __init__(self, cp: Attending, documents: Documents | None) -> None:
        super().__init__()
        self._cp, self._documents = cp, documents

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attend(self._cp, self._documents, *args, **kwargs)
        if func is Tensor.backward:
            func, args, kwargs = torch.autograd.backward, *_as_backward(*args, **kwargs)
        if func in _PASSES:
            # A mode is off while it is asked, and a checkpoint attends again in this call.
            with self:
                return _of_edges(func, *args, **kwargs)
        if func in _WHOLE_LAYERS:
            nothing: Any = None
            self._cp._attend(
                *(nothing, nothing, nothing),
                MeshAttentionError(
                    "torch.nn.MultiheadAttention and layers with it are not replaced; call "
                    "torch.nn.functional.scaled_dot_product_attention in the model"
                ),
            )
        return func(*args, **kwargs)


_PASSES = (torch.autograd.backward, torch.autograd.grad)


def _of_edges(func: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """A backward pass by edges of the graph in place of tensors: nobody is asked about it."""
    places = [_edges(x) for x in args[:2]] if func is torch.autograd.grad else [_edges(args[0])]
    given = {} if inputs is None else {"inputs": _edges(inputs)}
    return func(*places, *args[len(places) :], **given, **kwargs)


def _edges(tensors: Any) -> tuple[Any, ...]:
    found = (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)
    return tuple(get_gradient_edge(x) if isinstance(x, Tensor) else x for x in found)


def _as_backward(
    tensor: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `Tensor.backward` as those of `torch.autograd.backward`."""
    names = dict(zip(("retain_graph", "create_graph", "inputs"), args, strict=False))
    return (tensor, gradient), names | kwargs


def _attend(
    cp: Attending,
    documents: Documents | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With the arguments of `scaled_dot_product_attention`."""
    tensors = {"query": query, "key": key, "value": value}
    fault = fault_of_unsupported(dropout_p=dropout_p) or fault_of_kind(**tensors)
    if fault is None:
        fault = _fault_of_shapes(tensors, enable_gqa)
    if attn_mask is not None:
        fault = MeshAttentionError(
            "attn_mask is not supported; give the mask to ContextParallel (causal, window_size or "
            "mask) and documents to context_parallel, and leave attn_mask out"
        )
    q, k, v = query, key, value
    if fault is None:
        q, k, v = (_as_under_autocast(x).transpose(1, 2) for x in (q, k, v))
    out, _ = cp._attend(
        *(q, k, v, fault),
        documents=documents,
        softmax_scale=scale,
        is_causal=bool(is_causal),
    )
    return out.transpose(1, 2)


def _fault_of_shapes(tensors: dict[str, Tensor], enable_gqa: bool) -> MeshAttentionError | None:
    for name, x in tensors.items():
        if x.ndim != 4:
            return MeshAttentionError(
                f"{name} has shape {tuple(x.shape)}; expected (batch, heads, local_seq, head_dim)"
            )
    query, key = tensors["query"], tensors["key"]
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return MeshAttentionError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}: give enable_gqa=True"
        )
    return None


def _as_under_autocast(x: Tensor) -> Tensor:
    """As autocast has it for `scaled_dot_product_attention`."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() else x
