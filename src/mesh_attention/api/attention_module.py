"""Attention over ranks as an `nn.Module`, for models that are put together from modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.session.documents import Documents


class ContextParallelAttention(nn.Module):
    """`cp.attention` as a module, without parameters and without state.

    Copies of it, as `copy.deepcopy` of a layer makes them, use the same `cp`. `label` is given to
    its calls: the number of the layer, for instance. Left out, modules of a `cp` are told apart by
    the order in which they were made, so make them alike on all ranks; not in compiled code, which
    would be compiled again for each."""

    def __init__(self, cp: ContextParallel, label: str | int | None = None) -> None:
        super().__init__()
        self.cp, self.label = cp, label
        self._made_as = f"module {next(cp._calls.modules)}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """(batch, local_seq, heads, head_dim), as `ContextParallel.attention` has them."""
        label = self.label
        if label is None and not is_dynamo_compiling():
            label = self._made_as
        out = self.cp.attention(q, k, v, documents=documents, label=label)
        assert isinstance(out, Tensor)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelAttention:
        copy = memo[id(self)] = ContextParallelAttention(self.cp, self.label)
        return copy.train(self.training)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshAttentionError(
            "ContextParallelAttention holds a process group and cannot be pickled; save the "
            "state_dict of the model, and make the module again where it is loaded"
        )
