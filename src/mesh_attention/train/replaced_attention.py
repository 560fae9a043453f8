"""`cp.context_parallel(...)`: a block in which `scaled_dot_product_attention` attends over all
ranks, with the arguments of PyTorch's own `context_parallel`. The code of the model stays as it is.

A torch function mode (`_OverRanks`) finds the calls, however a model imported the name.
`sharded_buffers.py` sees to the buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.nn import Module, functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.attend import attend
from mesh_attention.request.compiled_attention import BLOCKS
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.request.tensor_checks import AttentionCall, fault_of_kind, fault_of_unsupported
from mesh_attention.runtime.session.collective_call import collective_call, of_calls
from mesh_attention.runtime.session.distributed_tensors import own_heads
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.train.sharded_buffers import check_buffers, sharded_buffers


@contextmanager
def replaced_attention(
    calls: ObjectCalls,
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    no_restore: Collection[Tensor],
    documents: Documents | None,
) -> Iterator[Documents | None]:
    """The block, as `ContextParallel.context_parallel` describes it."""
    if is_dynamo_compiling():
        raise MeshAttentionError("open a block of context_parallel around compiled code, not in it")
    # A block that is refused counts as a batch too.
    calls.session.batches.add(*(buffers if isinstance(buffers, list | tuple) else ()))
    check_buffers(buffers, dims, no_restore)
    knows_length = calls.fixed is not None or calls.arguments.get("seq_len") is not None
    if buffers and documents is None and not knows_length:
        documents = calls.documents([0, buffers[0].shape[dims[0]]])
    mode = _OverRanks(calls, documents)
    with sharded_buffers(calls.cut(documents) if buffers else None, buffers, dims, no_restore):
        with mode:
            yield documents
        mode.refuse_backward_to_come()


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
    """Replaces calls of this thread. PyTorch's threads of a backward pass take the modes of the
    thread that called `backward`."""

    def __init__(self, calls: ObjectCalls, documents: Documents | None) -> None:
        super().__init__()
        self._calls, self._documents = calls, documents
        # Reentrant checkpoints whose backward pass has not attended again, unless it never will:
        # PyTorch lets them go where no graph needs them, or when they are over.
        self._to_come = WeakSet[Any]()
        self.number = torch.tensor([BLOCKS.add(self)], device="cpu")  # in compiled code

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            label = None
            if not is_dynamo_compiling():  # otherwise when the graph runs
                self.note_checkpoints()
                label = running_module(sys._getframe(1))
            return _attend(self._calls, self._documents, self.number, label, *args, **kwargs)
        if func is Tensor.backward:  # which hands on all but the tensor by name
            func, kwargs = torch.autograd.backward, {**kwargs}
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
        if func in _PASSES:
            # A mode is off while it is asked, and a checkpoint attends again in this call.
            with self:
                return _of_edges(func, *args, **kwargs)
        if func in _WHOLE_LAYERS:
            nothing: Any = None
            fault = MeshAttentionError(
                "torch.nn.MultiheadAttention and layers with it are not replaced; call "
                "torch.nn.functional.scaled_dot_product_attention in the model"
            )
            attend(self._calls, AttentionCall(nothing, nothing, nothing), fault)
        return func(*args, **kwargs)

    def note_checkpoints(self) -> None:
        """Notes reentrant checkpoints around a call, each by the object that its passes share."""
        if torch.is_grad_enabled() and not self._to_come:
            return  # they attend without gradients first
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is CheckpointFunction.forward.__code__:
                self._to_come.add(frame.f_locals["ctx"])
            elif frame.f_code is CheckpointFunction.backward.__code__:
                self._to_come.discard(frame.f_locals["ctx"])
            frame = frame.f_back

    def refuse_backward_to_come(self) -> None:
        if self._to_come:
            raise MeshAttentionError(
                "a checkpoint with use_reentrant=True attends again in its backward pass, which "
                "has not come yet: after this block it would see the tokens of this rank alone; "
                "call backward in the block, or torch.no_grad() where no backward pass follows"
            )


_PASSES = (torch.autograd.backward, torch.autograd.grad)


def _of_edges(func: Any, roots: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward pass by edges of the graph in place of tensors, for which PyTorch asks no mode."""
    roots = _several(roots)
    name = "grad_outputs" if func is torch.autograd.grad else "grad_tensors"
    if kwargs.get(name) is None:  # of an edge nothing but the shape is known
        kwargs[name] = [
            torch.ones_like(x) if isinstance(x, Tensor) and x.numel() == 1 else None for x in roots
        ]
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = _edges(kwargs["inputs"])
    return func(_edges(roots), *map(_edges, args), **kwargs)


def _several(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)


def _edges(tensors: Any) -> tuple[Any, ...]:
    return tuple(get_gradient_edge(x) if isinstance(x, Tensor) else x for x in _several(tensors))


@collective_call(of_calls)
def _attend(
    calls: ObjectCalls,
    documents: Documents | None,
    block: Tensor,
    label: str | None,
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
    own, _, spread = own_heads(calls.ranks, 1, **tensors)
    tensors = dict(zip(tensors, own, strict=True))
    fault = fault_of_unsupported(dropout_p=dropout_p) or spread.fault
    if not is_dynamo_compiling():  # otherwise found out when the graph runs
        fault = fault or fault_of_kind(**tensors)
    if fault is None:
        fault = _fault_of_shapes(tensors, enable_gqa)
    if attn_mask is not None:
        fault = MeshAttentionError(
            "attn_mask is not supported; give the mask to ContextParallel (causal, window_size or "
            "mask) and documents to context_parallel, and leave attn_mask out"
        )
    q, k, v = tensors.values()
    if fault is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    call = AttentionCall(q, k, v, None, documents, label, scale, bool(is_causal), block)
    out, _ = attend(calls, call, fault)
    return spread.whole(out.transpose(1, 2))


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


_CALL = Module._call_impl.__code__
_BACKWARD = _engine_run_backward.__code__
# A checkpointed function runs again without what was around it, and must have the same label.
_ENDS = (unwrap(checkpoint).__code__, _BACKWARD)

# Names of modules, by model and part. A layer that is checkpointed runs again in a backward pass,
# without the model around it: then it has the name of its latest forward pass.
_PARTS: WeakKeyDictionary[Module, WeakKeyDictionary[Module, str]] = WeakKeyDictionary()
_LATEST: WeakKeyDictionary[Module, str] = WeakKeyDictionary()


def running_module(frame: FrameType | None) -> str | None:
    """A label, by which ranks find out that they are at different layers: the class of the model,
    and the name in it of the innermost module whose forward pass has come to `frame`. None in a
    function that is checkpointed or called outside any module. It is read from the stack: hooks on
    every module would be compiled and guarded."""
    running: list[FrameType] = []  # calls of modules, the innermost first
    while frame is not None:
        if frame.f_code is _CALL:
            running.append(frame)
        elif frame.f_code in _ENDS and not running:
            return None
        elif frame.f_code is _BACKWARD and running[0].f_locals["self"] in _LATEST:
            return _LATEST[running[0].f_locals["self"]]
        frame = frame.f_back
    if not running:
        return None
    module, model = (running[at].f_locals["self"] for at in (0, -1))
    kind, parts = type(model).__name__, _PARTS.get(model)
    if parts is None or module not in parts:
        parts = _PARTS[model] = WeakKeyDictionary()
        for name, part in model.named_modules():
            parts[part] = f"{kind}.{name}" if name else kind
        # A module that the model does not have among its own.
        parts.setdefault(module, f"{kind}: {type(module).__name__}")
    _LATEST[module] = parts[module]
    return parts[module]
