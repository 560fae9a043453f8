"""What training code asks of a `ContextParallel` besides attention: its batches, its loss,
and a block in which PyTorch's own attention is this one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.train.losses import Reduce, TokenMean, cross_entropy
from mesh_attention.train.replaced_attention import replaced_attention
from mesh_attention.train.sharded_batch import IGNORE_INDEX, ShardedBatch, shard_batch


class Training:
    _calls: ObjectCalls

    @outside_compile
    def shard_batch(
        self,
        *,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Any = None,
        documents: Documents | None = None,
        also: Sequence[Any] = (),
        shift_labels: bool = True,
        ignore_index: int = IGNORE_INDEX,
        check: bool | None = None,
        **others: Tensor | None,
    ) -> ShardedBatch:
        """This rank's part of a whole batch, (batch, tokens) and the same on all ranks of the
        group: once a batch, any length, and nothing is sent.

        labels          of each token itself, as in Hugging Face: they are shifted here, over the
                        whole sequence, so that the loss is local and shifts nothing. The last token
                        of a document has no target, nor has padding: `ignore_index`.
                        `shift_labels=False`: they are targets already
        position_ids    (tokens) or (batch, tokens); without, counted in each document
        cu_seqlens      the documents, as `documents()` takes them: one list for all rows or one for
                        each; `documents`: what was made of them already, by `prefetch` say. Without
                        either, position_ids that restart at 0 begin documents
        attention_mask  (batch, tokens), 0 at padding on the left or on the right, which becomes a
                        document of its own. Other masks are refused
        others          any tensors (batch, tokens, ...), sharded alike
        check           what ranks compare, in the first call that uses the batch: None, whole
                        numbers that are on the CPU, and shapes of all others; True, everything
                        (what is on a device is fetched, for which the host waits); False, shapes
                        and documents only. A rank that differs is named

        Rows with different documents, by their padding too, become one pack (`documents()`).
        """
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
            ignore_index=ignore_index,
            check=check,
        )

    @outside_compile
    @collective_call(of_object)
    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor | None,
        *,
        reduce: Reduce,
        data_parallel: dist.ProcessGroup | DeviceMesh | None = None,
        num_targets: int | Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> TokenMean:
        """The mean over all targets of all ranks, from this rank's logits (batch, local tokens,
        vocabulary) and targets (batch, local tokens), the labels of `shard_batch`.

        `.loss` is for `backward`, `.value` is the mean, for people. With S the sum of the losses of
        this rank's targets, N the number of targets of all ranks and R that of the ranks, `.loss`
        is S / N for `reduce="sum"`: gradients are then to be added up over all R ranks. It is
        S R / N for "ddp" and "fsdp", which divide the sum of gradients by R. Either way parameters
        get the gradient of the mean, whoever has how many targets, none included. Where there is no
        target at all the loss is 0.

        All ranks are those of the group, and with `data_parallel`, a group of ranks that hold the
        same tokens of other batches (`mesh["dp"]`), all those; it may also be a group of them all.
        The framework must reduce gradients over exactly these ranks.

        `num_targets` in place of N: of several batches whose gradients are accumulated, on all
        ranks (`.num_targets` of their `shard_batch`, added up, over data-parallel ranks too).

        Sums are float64, logits of 16 bits become float32. One all-reduce of ten numbers over the
        group, and one over `data_parallel`; ranks compare what they call, as for attention, and
        those of other replicas with them: what differs is an error, on CUDA a loss of NaN.
        """
        return cross_entropy(
            self._calls.user,
            self._calls.options,
            logits,
            targets,
            reduce=reduce,
            data_parallel=data_parallel,
            num_targets=num_targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )

    def context_parallel(
        self,
        *,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
        documents: Documents | None = None,
    ) -> AbstractContextManager[Documents | None]:
        """A block in which `torch.nn.functional.scaled_dot_product_attention` is attention over all
        ranks, with the arguments of PyTorch's `context_parallel`.

            with cp.context_parallel(buffers=[ids, positions], buffer_seq_dims=[1, 0]) as documents:

        buffers             whole tensors, the same on all ranks, that hold this rank's part in the
                            block and are restored after it, also after an exception. The first says
                            the length, where the object does not; lengths that need padding are
                            refused
        buffer_seq_dims     the dimension of the tokens, of each
        no_restore_buffers  those of them that keep this rank's part
        documents           of this batch, where it has several; what the block gives (`as`) is
                            this, or what was made of the length: for `unshard` and inner blocks

        Calls have (batch, heads, local_seq, head_dim) and may say `scale`, `enable_gqa` and an
        `is_causal` that is the object's; attn_mask and dropout are refused on all ranks. It holds
        for this thread, and the innermost block counts. Backward may come after the block; with
        activation checkpointing, which attends again, it belongs inside, or is refused.
        """
        return replaced_attention(
            self._calls,
            () if buffers is None else buffers,
            () if buffer_seq_dims is None else buffer_seq_dims,
            () if no_restore_buffers is None else no_restore_buffers,
            documents,
        )
