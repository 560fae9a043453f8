"""Batches on a `ContextParallel`: how tensors are cut, joined and numbered, for all batches alike
or by the documents that each brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mesh_attention.choose.pack import Pack, Packer
from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.object_calls import ObjectCalls, checked
from mesh_attention.request.position_checks import fault_of_positions
from mesh_attention.request.tensor_checks import refuse_label
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.distributed_tensors import own_tokens
from mesh_attention.runtime.session.documents import Batch, Documents, prefetch
from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.runtime.session.sharding import Grad, Side


class Batches:
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
        """What a batch brings: the boundaries of its documents, and with them its length.

        Made once a batch, and handed to every call on its tensors. `cu_seqlens` are cumulative
        starts (0, ..., tokens) as for `flash_attn_varlen_func`, on the CPU: a list, a tensor, or a
        list of lists, one for each row of the batch, which then is one pack of all rows; or the
        `Pack` that a `packer` made elsewhere. `also`: other objects on this group that are called
        with the same tensors, for instance with a window: the layout is chosen for all of them.

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
                "a Pack holds all documents, and was chosen for the layers of its packer: give "
                "'kv_cu_seqlens' and 'also' there, not beside it"
            )
        return Documents(self._calls.session, pack)

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
        nor other ranks, and can be pickled: a collate function in another process may call it.
        Experimental."""
        self._calls.user.refuse_if_closed(sends=False)
        return self._calls.packer(also)

    # Sharding.

    @outside_compile
    def shard(
        self, x: Tensor, dim: int, *, side: Side = "q", documents: Documents | None = None
    ) -> Tensor:
        """This rank's slots of a whole tensor along `dim`; padding slots are zero. A DTensor that
        is spread over other dimensions, on a mesh beside the group's, gives one spread alike."""
        self._calls.session.batches.add(x)
        own, spread = own_tokens(self._calls.ranks, x, dim)
        return spread.whole(self._calls.cut(documents).shard(own, dim, side))

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

        Each rank gets the gradient of its own slots, and where a loss depends on the result `grad`
        must say which: "sum", that of all ranks' losses added up; "mean", that divided by their
        number; "own", that of this rank's loss, for which nothing is sent. For a loss that every
        rank computes alike from the whole tensor: "sum" under DDP and FSDP2 over the group, which
        divide by its size; "own", or "mean", if gradients of parameters are added up.
        """
        calls = self._calls
        shards = calls.shards(documents)
        calls.user.refuse_if_closed()
        refuse_label(label)
        own, spread = own_tokens(calls.ranks, x, dim)
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
        """Position in the sequence of each local slot (for RoPE); padding is `>= seq_len`.

        With `restart` counted from the start of each document, and padding is at 0.
        """
        return self._calls.shards(documents).positions(side, device, restart=restart)

    @outside_compile
    @collective_call(of_object)
    def check_positions(
        self, position_ids: Tensor, *, side: Side = "q", documents: Documents | None = None
    ) -> None:
        """Raises on all ranks, with the name of the layout that they are of, unless these are the
        positions of this rank's slots, (..., local tokens), as `positions` has them. What RoPE is
        given says how tensors were cut. Ranks wait for each other, and for a device."""
        calls = self._calls
        calls.user.refuse_if_closed()
        try:
            own = None if documents is None else checked(documents).position_ids
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
        """True where a local slot holds no token."""
        return self._calls.shards(documents).padding(side, device)
