"""Batches on a `ContextParallel`: how tensors are cut, joined and numbered, for all batches alike
or by the documents that each brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mesh_attention.api.arguments import kept_source, layer_of_batches, read_arguments
from mesh_attention.api.report import Reports
from mesh_attention.api.sizes import (
    SIZES,
    USUAL_TOKENS,
    fault_of_length,
    has_sizes,
    sizes_of,
    usual_sizes,
)
from mesh_attention.choose.pack import Layer, Pack, Packer
from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.session.collective_call import of_object, told_to_all
from mesh_attention.runtime.session.distributed_tensors import own_tokens
from mesh_attention.runtime.session.documents import BatchPlans, Documents
from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.runtime.session.plan_on_rank import PlanOnRank, PlanSource
from mesh_attention.runtime.session.prefetch import Batch, prefetch
from mesh_attention.runtime.session.prepared_call import CallOptions
from mesh_attention.runtime.session.shards import Shards, Side


class Batches(Reports):
    """`_given` are the arguments of the object, by name. Where they do not say the sizes, calls
    do, and plans are made when they come."""

    _given: dict[str, Any]

    def __init__(self) -> None:
        self._layers: dict[tuple[Any, ...], Layer] = {}

    # Documents that change with every batch.

    @outside_compile
    def documents(
        self,
        cu_seqlens: Any,
        *,
        kv_cu_seqlens: Any = None,
        also: Sequence[Batches] = (),
    ) -> Documents:
        """What a batch brings: the boundaries of its documents, and with them its length.

        Made once a batch, and handed to every call on its tensors. `cu_seqlens` are cumulative
        starts (0, ..., tokens) as for `flash_attn_varlen_func`, on the CPU: a list, a tensor, or a
        list of lists, one for each row of the batch, which then is one pack of all rows; or the
        `Pack` that a `packer` made elsewhere. `also`: other objects on this group that are called
        with the same tensors, for instance with a window: the layout is chosen for all of them.

        Nothing is sent: a rank with other documents is named by the first call that uses them.
        """
        self._share.refuse_if_closed(sends=False)
        if not isinstance(cu_seqlens, Pack):
            pack = self.packer(also=also)(cu_seqlens, kv_cu_seqlens)
        elif kv_cu_seqlens is None and not also:
            pack = cu_seqlens
        else:
            raise MeshAttentionError(
                "a Pack holds all documents, and was chosen for the layers of its packer: give "
                "'kv_cu_seqlens' and 'also' there, not beside it"
            )
        return Documents(self._share.context, pack)

    @outside_compile
    def prefetch(
        self,
        loader: Iterable[Batch],
        cu_seqlens: Callable[[Batch], Any],
        *,
        also: Sequence[Batches] = (),
    ) -> Iterator[tuple[Batch, Documents]]:
        """Every batch of a loader with its documents, made ready in a thread one batch ahead, for
        the calls that the last batch was used for. `cu_seqlens` takes them from a batch; both it
        and the loader run in that thread, so neither may communicate with other ranks.

            for batch, docs in cp.prefetch(loader, lambda batch: batch["cu_seqlens"]):
        """
        if not callable(cu_seqlens):
            raise MeshAttentionError(
                f"cu_seqlens={cu_seqlens!r}: give a function that takes them from a batch"
            )
        return prefetch(loader, lambda batch: self.documents(cu_seqlens(batch), also=also))

    @outside_compile
    def packer(self, *, also: Sequence[Batches] = ()) -> Packer:
        """`packer(cu_seqlens)` chooses for a batch what `documents` would. It needs neither torch
        nor other ranks, and can be pickled: a collate function in another process may call it."""
        self._share.refuse_if_closed(sends=False)
        context = self._share.context
        others = list(also) if isinstance(also, Sequence) else [also]
        for one in others:
            if not isinstance(one, Batches) or one._share.context is not context:
                raise MeshAttentionError(
                    f"also={also!r}: give a list of ContextParallel objects on the same group"
                )
        layers = tuple(one._layer() for one in (self, *others))
        wanted = dict.fromkeys(layer.layout for layer in layers if layer.layout is not None)
        if len(wanted) > 1:
            raise MeshAttentionError(
                f"objects that share a batch want different layouts: {', '.join(wanted)}; the "
                "tensors of a batch have one"
            )
        if len({layer.relayout for layer in layers}) > 1:
            raise MeshAttentionError(
                "objects that share a batch differ in relayout, and the shards of a batch lie in "
                "one way; say relayout=True in all of them, or in none"
            )
        return Packer(layers, len(context.groups.ranks))

    def _layer(self, sizes: Mapping[str, Any] | None = None) -> Layer:
        """What is asked for in batches that bring their own documents and length."""
        given = self._given | dict(sizes or {})
        if not has_sizes(given):
            # Not those of the last call: a batch may be made ready before it, on some ranks.
            given = usual_sizes(given)
        key = tuple(given.get(name) for name in SIZES)
        if key not in self._layers:
            asked, options = read_arguments(self._share.context.groups.parent, given)
            self._layers[key] = layer_of_batches(asked, given, options)
        return self._layers[key]

    def _source_for(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | BatchPlans | None
    ) -> tuple[PlanSource, CallOptions]:
        """Plans for a call, and its options."""
        context, given = self._share.context, self._given
        if documents is None:
            if self._fixed is None:
                sizes = sizes_of(context, given, q, k, v)
                self._latest = kept_source(context, given | sizes)[0]
            self._batch = None
            return self._source, self._options
        layer = self._layer()
        if self._fixed is None:
            sizes = sizes_of(context, given, q, k, v) | {
                "seq_len": USUAL_TOKENS,
                "kv_seq_len": USUAL_TOKENS,
            }
            layer = self._layer(sizes)
        plans = documents if isinstance(documents, BatchPlans) else _handle(documents).plans
        source = plans.source(context, layer)
        self._batch = source.first.plan, plans.pack, layer
        return source, self._options.of_batch()

    # Sharding.

    @outside_compile
    def shard(
        self, x: Tensor, dim: int, *, side: Side = "q", documents: Documents | None = None
    ) -> Tensor:
        """This rank's slots of a whole tensor along `dim`; padding slots are zero. A DTensor that
        is spread over other dimensions, on a mesh beside the group's, gives one spread alike."""
        own, spread = own_tokens(self._share.context.groups.ranks, x, dim)
        return spread.whole(self._shards(documents).shard(own, dim, side))

    @outside_compile
    @told_to_all(of_object)
    def unshard(
        self, x: Tensor, dim: int, *, side: Side = "q", documents: Documents | None = None
    ) -> Tensor:
        """The whole tensor on every rank, in token order, without padding.

        Differentiable for a loss that every rank computes alike from the whole tensor: each rank
        passes on the gradient of its own slots. DTensors as in `shard`.
        """
        shards, context = self._shards(documents), self._share.context
        self._share.refuse_if_closed()
        own, spread = own_tokens(context.groups.ranks, x, dim)
        return spread.whole(shards.unshard(self._share, self._options, own, dim, side))

    @outside_compile
    def positions(
        self,
        *,
        side: Side = "q",
        device: torch.device | str | None = None,
        documents: Documents | None = None,
        restart: bool = False,
    ) -> Tensor:
        """Position in the sequence of each local slot (for RoPE); padding is `>= seq_len`.

        With `restart` counted from the start of each document, and padding is at 0.
        """
        return self._shards(documents).positions(side, device, restart=restart)

    @outside_compile
    def padding(
        self,
        *,
        side: Side = "q",
        device: torch.device | str | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """True where a local slot holds no token."""
        return self._shards(documents).padding(side, device)

    @property
    def _length_is_known(self) -> bool:
        return self._fixed is not None or self._given.get("seq_len") is not None

    def _shards(self, documents: Documents | None) -> Shards:
        if documents is not None:
            return _handle(documents).shards
        mine = self._mine_of_length() if self._fixed is None else self._mine
        plan, mask = mine.plan, mine.plan.problem.mask
        starts = mask.documents or (0, plan.problem.q_tokens)
        kv_starts = mask.kv_documents or mask.documents or (0, plan.problem.keys)
        return Shards(
            *(*plan.shards, mine.rank, plan.devices, mine.words),
            starts=(starts, kv_starts),
        )

    def _mine_of_length(self) -> PlanOnRank:
        """A plan for heads of the usual size: it lays out tokens as any other of this length."""
        if self._given.get("seq_len") is None:
            raise fault_of_length(self._given)
        return kept_source(self._share.context, usual_sizes(self._given), chosen=False)[0].first


def _handle(documents: Any) -> Documents:
    if not isinstance(documents, Documents):
        raise MeshAttentionError(
            f"documents={documents!r}: give what documents(cu_seqlens) returned for this batch"
        )
    return documents
