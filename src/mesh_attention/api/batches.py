"""Batches on a `ContextParallel`: how tensors are cut, joined and numbered, for all batches alike
or by the documents that each brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from mesh_attention.choose.pack import Pack, Packer
from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.request.port_checks import fault_of_positions, refuse_other_join
from mesh_attention.request.tensor_checks import fault_of_label
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.distributed_tensors import own_tokens
from mesh_attention.runtime.session.documents import (
    Batch,
    Documents,
    checked_documents,
    prefetch,
)
from mesh_attention.runtime.session.layouts import KNOWN_LAYOUTS
from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.runtime.session.sharding import Grad, Side
from mesh_attention.train.sharded_batch import IGNORE_INDEX, ShardedBatch, shard_batch


class Batches:
    """A base of `ContextParallel`, which sets `_calls`."""

    _calls: ObjectCalls

    # Documents that change with every batch.

    @outside_compile
    def documents(
        self,
        cu_seqlens: Any,
        *,
        kv_cu_seqlens: Any = None,
        also: Sequence[Batches] = (),
    ) -> Documents:
        """The documents of a batch, and with them its length: made once a batch, and given to every
        call on its tensors.

        cu_seqlens      cumulative starts (0, ..., tokens) as for `flash_attn_varlen_func`, on the
                        CPU: a list, a tensor, or a list for each row, which makes one pack of all
                        rows; or the `Pack` that a `packer` made elsewhere
        kv_cu_seqlens   those of the keys, if they differ
        also            other objects on this group that attend to the same tensors, for instance
                        with a window: the layout is chosen for all of them

        Nothing is sent: a rank with other documents is named by the first call that uses them.
        """
        self._calls.user.refuse_if_closed(sends=False)
        self._calls.session.batches.add()
        if not isinstance(cu_seqlens, Pack):
            pack = self.packer(also=also)(cu_seqlens, kv_cu_seqlens)
        elif kv_cu_seqlens is None and not also:
            pack = cu_seqlens
        else:
            raise MeshAttentionError(
                "a Pack holds all documents and the choice for the layers of its packer: give "
                "'kv_cu_seqlens' and 'also' to the packer instead"
            )
        return self._calls.of_pack(pack)

    @outside_compile
    def prefetch(
        self,
        loader: Iterable[Batch],
        cu_seqlens: Callable[[Batch], Any],
        *,
        also: Sequence[Batches] = (),
    ) -> Iterator[tuple[Batch, Documents]]:
        """Every batch of a loader with its documents, planned in a thread one batch ahead.

            for batch, docs in cp.prefetch(loader, lambda batch: batch["cu_seqlens"]):

        `cu_seqlens` is a function that takes them from a batch. It and the loader run in that
        thread, so neither may communicate with other ranks.
        """
        if not callable(cu_seqlens):
            raise MeshAttentionError(
                f"cu_seqlens={cu_seqlens!r}: give a function that takes them from a batch"
            )
        return prefetch(loader, lambda batch: self.documents(cu_seqlens(batch), also=also))

    @outside_compile
    def packer(self, *, also: Sequence[Batches] = ()) -> Packer:
        """A function for collate functions in other processes: `packer(cu_seqlens)` chooses what
        `documents` would, and `documents(pack)` takes its result. It can be pickled, and needs
        neither torch nor other ranks. Experimental."""
        self._calls.user.refuse_if_closed(sends=False)
        return self._calls.packer(also)

    # Sharding.

    @outside_compile
    def shard_batch(
        self,
        *batches: Never,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Any = None,
        documents: Documents | None = None,
        also: Sequence[Batches] = (),
        shift_labels: bool = True,
        ahead: int | None = None,
        ignore_index: int = IGNORE_INDEX,
        check: bool | None = None,
        **others: Tensor | None,
    ) -> ShardedBatch:
        """This rank's part of a whole batch. Call it once a batch, on all ranks of the group, with
        the same tensors of (batch, tokens), of any length. Nothing is sent.

        labels          each token's own id, as in Hugging Face. They are shifted here, over the
                        whole sequence, so the loss must shift nothing. The last token of a document
                        and padding get `ignore_index`
        shift_labels    False: the labels are targets already
        ahead           how many targets a token has, for heads that predict several: then
                        `labels[..., 0]` is the next token, `labels[..., 1]` the one after it, ...
        position_ids    (tokens) or (batch, tokens); left out: counted in each document
        cu_seqlens      documents, as `documents()` takes them: one list for all rows, or one for
                        each. Left out, position_ids that restart at 0 begin documents
        documents       instead of cu_seqlens: what `documents()` or `prefetch` made of them
        also            other objects that attend to this batch, as in `documents()`
        attention_mask  (batch, tokens), 0 at padding on the left or on the right, which becomes a
                        document of its own. Other masks are refused
        others          any other tensors of (batch, tokens, ...), cut in the same way
        check           what ranks compare in the first call that uses the batch. None: whole
                        numbers on the CPU, and shapes of the rest. True: everything; the host waits
                        for what is on a device. False: shapes and documents

        Rows with different documents, or different padding, become one pack: one row.
        """
        if batches:
            raise MeshAttentionError(
                "shard_batch takes tensors by name: shard_batch(**batch), or input_ids=, labels= "
                "and others"
            )
        tensors = {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **others,
        }
        return shard_batch(
            self._calls,
            tensors,
            cu_seqlens=cu_seqlens,
            documents=documents,
            also=also,
            shift_labels=shift_labels,
            ahead=ahead,
            ignore_index=ignore_index,
            check=check,
        )

    @outside_compile
    def shard(
        self, x: Tensor, dim: int, *, side: Side = "q", documents: Documents | None = None
    ) -> Tensor:
        """This rank's part of a whole tensor along `dim`; padding is zero. `side="kv"` cuts keys,
        where they differ in number from queries. A DTensor that is sharded over other dimensions,
        on a mesh beside the group's, gives one with the same placements."""
        self._calls.session.batches.add(x)
        own, spread = own_tokens(self._calls.ranks, x, dim)
        shards = self._calls.cut(documents)
        shard = shards.shard(own, dim, side)
        KNOWN_LAYOUTS.keep(shard, shards.layout(side), self._calls.session.groups.ranks, dim)
        return spread.whole(shard)

    @outside_compile
    @collective_call(of_object)
    def unshard(
        self,
        x: Tensor,
        dim: int,
        *,
        side: Side = "q",
        documents: Documents | None = None,
        grad: Grad | None = None,
        label: str | int | None = None,
    ) -> Tensor:
        """The whole tensor on every rank, in token order, without padding. DTensors as in `shard`,
        `label` as in `attention`.

        If a loss depends on the result, `grad` must say which gradient each rank's part gets:

        "sum"   those of all ranks' losses, added up. For a loss that every rank computes alike,
                under DDP or FSDP2 over the group, which divide by its size
        "mean"  that sum divided by the number of ranks. For such a loss, if you add up gradients of
                parameters
        "own"   that of this rank's loss; nothing is sent. For the same case as "mean"
        """
        calls = self._calls
        shards = calls.shards(documents, is_asked=False)
        calls.user.refuse_if_closed()
        raise_fault(fault_of_label(label))
        own, spread = own_tokens(calls.ranks, x, dim)
        if documents is None:
            layout, how = shards.layout(side), {"is_trusted": calls.is_trusted}
            refuse_other_join(calls.session, calls.name, own, layout, **how)
        return spread.whole(shards.unshard(calls.user, calls.options, own, dim, side, grad, label))

    @outside_compile
    def positions(
        self,
        *,
        side: Side = "q",
        device: torch.device | str | None = None,
        documents: Documents | None = None,
        restart: bool = False,
    ) -> Tensor:
        """The position of each local token in the sequence, for RoPE; padding is `>= seq_len`.

        With `restart=True` counted from the start of each document; padding is then 0.
        """
        return self._calls.shards(documents).positions(side, device, restart=restart)

    @outside_compile
    @collective_call(of_object)
    def check_positions(
        self, position_ids: Tensor, *, side: Side = "q", documents: Documents | None = None
    ) -> None:
        """Raises on all ranks unless `position_ids`, (..., local tokens), are those of this rank's
        tokens. The error names the layout that they belong to. Pass what you pass to RoPE, once,
        after a port. Ranks wait for each other, and for the device."""
        calls = self._calls
        calls.user.refuse_if_closed()
        try:
            own = None if documents is None else checked_documents(documents).position_ids
            fault = fault_of_positions(calls.shards(documents), side, position_ids, own)
        except MeshAttentionError as error:  # the others must not wait for us
            fault = error
        calls.session.calls.agree({"call": "check_positions"}, calls.options, fault)

    @outside_compile
    def padding(
        self,
        *,
        side: Side = "q",
        device: torch.device | str | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """True where this rank holds padding and no token."""
        return self._calls.shards(documents, is_asked=False).padding(side, device)
