"""The documents of a batch: what `ContextParallel.documents` makes, once a batch, for all layers.

It holds how the tensors of the batch are shared out, and the calls that were made ready for it,
which go when it goes, or with the last backward pass of compiled code that may need them. Nothing
in it is agreed on with other ranks: every call compares what it is made for, and a rank with other
documents is named then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mesh_attention.choose.pack import Layer, Pack
from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.agreement.identity import BatchIdentity
from mesh_attention.runtime.session.caches import PlanSource, WeakRegistry
from mesh_attention.runtime.session.modes import outside_inference_mode
from mesh_attention.runtime.session.session import Session
from mesh_attention.runtime.session.sharding import Shards
from mesh_attention.runtime.transport.job_store import in_thread

Batch = TypeVar("Batch")


class BatchPlans:
    """Plans for the calls on one batch, of every layer that it goes through. `batch`: which one,
    where its tensors are known; `is_asked`: whether the caller has asked how they lie."""

    def __init__(self, session: Session, pack: Pack, batch: BatchIdentity | None = None) -> None:
        self.session, self.pack, self.batch = session, pack, batch
        self.is_asked = False
        self._sources: dict[tuple[Layer, bool], PlanSource] = {}
        self._releases = session.groups.releases
        self.warm: dict[Any, Any] = {}  # prepared calls by what their checks depend on

    def of_batch(self, batch: BatchIdentity | None) -> BatchPlans:
        """Of another batch with the same documents, which shares plans and prepared calls."""
        other = copy(self)
        other.batch = batch
        return other

    def source(self, session: Session, layer: Layer, keeps: bool) -> PlanSource:
        """Plans for the calls of a layer. `keeps`: forward passes may leave rows to backward passes
        (`PlanSource.of_shards`)."""
        if session is not self.session:
            raise MeshAttentionError(
                "these documents were made on another process group; make them with documents() "
                "of an object on this one"
            )
        if self._releases != session.groups.releases:
            # What calls held is gone with the last object.
            self._sources.clear()
            self._releases = session.groups.releases
        if (layer, keeps) not in self._sources:
            question = self.pack.question(layer)
            question = question if keeps else question.of_shards
            self._sources[layer, keeps] = PlanSource(question, session.plans.of, of_batch=True)
        return self._sources[layer, keeps]

    def prefetch_like(self, other: BatchPlans) -> None:
        """Makes ready the kinds of call that `other`, another batch, was used for."""
        for kind_of_layer, source in list(other._sources.items()):
            source_here = self.source(self.session, *kind_of_layer)
            for of_kind in list((source.calls or {}).values()):
                for like in list(of_kind.calls):
                    needs_grad = True in of_kind.kind.agreed
                    self.session.calls.prefetch(source_here, like, needs_grad)


BATCH_PLANS: WeakRegistry[BatchPlans] = WeakRegistry(
    "the documents of this call are gone: hooks that offload saved tensors copy them, so hold the "
    "documents, or the batch, until its backward pass is over"
)


class Documents:
    """The documents of one batch, for every object on the process group that they were made for.

    pack    how planning shares the batch out; printed, it says what was chosen and why
    batch   which batch, where its tensors are known
    like    the plans of another batch with the same documents, which this one shares
    """

    def __init__(
        self,
        session: Session,
        pack: Pack,
        batch: BatchIdentity | None = None,
        like: BatchPlans | None = None,
    ) -> None:
        num_ranks, place = len(session.groups.ranks), dist.get_rank(session.groups.parent)
        if pack.layout.num_ranks != num_ranks:
            raise MeshAttentionError(
                f"the pack is for {pack.layout.num_ranks} ranks, and the process group has "
                f"{num_ranks}"
            )
        self.pack = pack
        self.shards = Shards(
            *pack.shards,
            rank=place,
            words=pack.words,
            starts=(pack.documents, pack.kv_documents),
            num_rows=pack.num_rows,
            of_batch=True,
            batch=batch,
        )
        self.plans = BatchPlans(session, pack, batch) if like is None else like.of_batch(batch)
        # Of this rank, where the batch came with some.
        self.position_ids: torch.Tensor | None = None
        self.padding: torch.Tensor | None = None
        # In compiled code the documents are this tensor: no graph depends on which ones they are,
        # and whoever keeps it for a backward pass keeps the plans, which hang on it.
        with outside_inference_mode():
            self.number = torch.tensor([BATCH_PLANS.add(self.plans)], device="cpu")
        self.number.plans = self.plans  # type: ignore[attr-defined]

    @property
    def num_tokens(self) -> int:
        """Of the whole batch: of all its rows, where each has documents of its own."""
        return self.pack.documents[-1]

    def __len__(self) -> int:
        """How many documents."""
        return len(self.pack.documents) - 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshAttentionError(
            "these documents hold plans of this process and cannot be copied or pickled: use the "
            "same object for all calls on the batch; their `pack` travels, and documents(pack) "
            "makes them elsewhere"
        )

    def __repr__(self) -> str:
        documents = "1 document" if len(self) == 1 else f"{len(self)} documents"
        return f"<{documents} of {self.num_tokens} tokens: {self.pack.reason}>"

    def of_batch(self, batch: BatchIdentity) -> Documents:
        """The same for the tensors of one batch: calls compare which one it is."""
        return Documents(self.plans.session, self.pack, batch, self.plans)

    def in_chunks(self, tokens: int) -> Documents:
        """For calls on the same tensors that see chunks of documents, `tokens` each, in place of
        documents."""
        chunks = Documents(self.plans.session, self.pack.in_chunks(tokens), self.plans.batch)
        chunks.plans.is_asked = self.plans.is_asked
        return chunks


def checked_documents(documents: Any) -> Documents:
    if isinstance(documents, Mapping):
        raise MeshAttentionError("documents is a whole batch: give documents=batch.documents")
    if not isinstance(documents, Documents):
        raise MeshAttentionError(
            f"documents={documents!r}: give what documents(cu_seqlens) returned for this batch"
        )
    return documents


def prefetch(
    loader: Iterable[Batch], make: Callable[[Batch], Documents]
) -> Iterator[tuple[Batch, Documents]]:
    """Every batch with its documents; the next batch of the loader is made ready meanwhile.

    A thread of the trainer's process makes ready choices, plans and masks on the device, one batch
    ahead, for the kinds of call that the last batch was used for. Where it fails nothing is kept:
    the call itself then meets the same error, and tells all ranks. On a GPU it works on a stream of
    its own (`PrefetchStreams`).
    """
    batches = chain(loader)  # which asks the loader for nothing before the thread does

    def take(like: Documents | None) -> tuple[Batch, Documents] | None:
        for batch in batches:
            documents = make(batch)
            if like is not None:
                with suppress(Exception):  # the call meets it again, and tells all ranks
                    documents.plans.prefetch_like(like.plans)
            return batch, documents
        return None

    used: Documents | None = None
    # Whoever leaves the loop need not wait for a loader.
    coming, _ = in_thread("prefetch", partial(take, None))
    while (ready := coming.result()) is not None:
        # Nobody knows yet what this batch will be used for; the one before was used.
        coming, _ = in_thread("prefetch", partial(take, used))
        ready[1].plans.session.batches.add()
        yield ready
        used = ready[1]
