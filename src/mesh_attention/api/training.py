"""What training code asks of a `ContextParallel` besides attention: losses over all ranks, less
memory, and a block in which PyTorch's own attention is this one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.runtime.agreement.batch_identity import BatchIdentity
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.runtime.session.session import User
from mesh_attention.train.keep_attention import KeepAttention, in_compiled_code
from mesh_attention.train.loss_kernels import LossKernel
from mesh_attention.train.losses import cross_entropy
from mesh_attention.train.means import LossCall, Means, Reduce, TokenMean
from mesh_attention.train.policy import Per, log_probs, log_probs_together, token_mean
from mesh_attention.train.replaced_attention import replaced_attention
from mesh_attention.train.sharded_batch import IGNORE_INDEX
from mesh_attention.train.sharded_weight import is_of_fsdp
from mesh_attention.train.tiled import Tiled
from mesh_attention.train.whole_batch import MARK


class Training:
    _calls: ObjectCalls

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
        kernel: LossKernel | None = None,
        label: str | int | None = None,
    ) -> TokenMean:
        """The mean cross-entropy over all targets of all ranks, from this rank's logits (batch,
        local tokens, vocabulary) and targets (batch, local tokens), the labels of `shard_batch`.

        Call `.loss.backward()`; print `.value`, which is the mean. Parameters get the gradient of
        the mean, however the targets are shared out. Without any target the loss is 0.

        reduce          what becomes of gradients: "ddp" or "fsdp" if they are averaged over all
                        ranks, "sum" if they are added up
        data_parallel   the ranks that hold the same tokens of other batches (`mesh["dp"]`), or a
                        group of all ranks. Gradients must be reduced over exactly these and the
                        ranks of this object
        num_targets     where gradients of several batches are accumulated: how many targets these
                        have in all, on all ranks, data-parallel ones too
        kernel          "liger": Liger's kernel for losses (the extra `liger`); "plain": PyTorch's
                        operators; None: the first that can. `kernels()` says which, and why
        label           as in `attention`, for several losses of one batch

        With S the sum over this rank's targets, N the number of all targets and R that of all
        ranks, `.loss` is S / N for "sum" and S R / N for the others. Sums are float64, logits of 16
        bits become float32; gradients are made in the forward pass. It costs one all-reduce of ten
        numbers over each of the groups. Ranks and replicas that call differently get an error, on
        CUDA a loss of NaN.
        """
        means = self._means("cross_entropy", reduce, data_parallel, num_targets, label, targets)
        how: dict[str, Any] = {"label_smoothing": label_smoothing}
        return cross_entropy(means, logits, targets, None, kernel, ignore_index, **how)

    @outside_compile
    @collective_call(of_object)
    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor | None,
        *,
        bias: Tensor | None = None,
        reduce: Reduce,
        data_parallel: dist.ProcessGroup | DeviceMesh | None = None,
        num_targets: int | Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
        chunk_tokens: int | None = None,
        kernel: LossKernel | None = None,
        label: str | int | None = None,
    ) -> TokenMean:
        """`cross_entropy` of the logits `hidden @ weight.T + bias`, which are made a chunk at a
        time: from hidden states (batch, local tokens, width) and a weight (vocabulary, width).

        softcap         logits become softcap * tanh(logits / softcap)
        low_rank        a second product that is added to the logits, of (batch, local tokens, few)
                        and (vocabulary, few): LoRA's, as (scaling * lora_A(hidden), lora_B.weight)
        z_loss          times the square of the log-sum-exp of each target's logits is added
        chunk_tokens    tokens whose logits are there at a time; None: as many as 1 GiB holds

        A weight that FSDP2 holds in parts is gathered, and its gradient reduced to the parts as
        `reduce` says, over the ranks of FSDP2: those of this object and of `data_parallel`. In the
        forward of the module that holds it, it is whole without that.

        Gradients are made in the forward pass, that of the weight in float32, and scaled in the
        backward pass; under `torch.no_grad` or for a frozen weight they are not made. Under
        autocast products are in its dtype, for which the weight is copied. Sums are float32 or
        better, and so are logits; with Liger's kernel logits have the dtype of products, as those
        of `nn.Linear` have.
        """
        return cross_entropy(
            self._means("linear_cross_entropy", reduce, data_parallel, num_targets, label, labels),
            hidden,
            labels,
            (weight, bias, low_rank),
            kernel,
            ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            chunk_tokens=chunk_tokens,
        )

    @outside_compile
    def log_probs(
        self,
        hidden_or_logits: Tensor,
        tokens: Tensor,
        *,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        temperature: float = 1.0,
        softcap: float | None = None,
        ignore_index: int = IGNORE_INDEX,
        chunk_tokens: int | None = None,
        reduce: Reduce | None = None,
        statistics: Sequence[str] = (),
        label: str | int | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities of this rank's tokens (batch, local tokens), such as the labels of
        `shard_batch`, and entropies, both differentiable, 0 where a token is `ignore_index`.

        Takes logits, or hidden states and a `weight`: then logits are made in chunks, and again in
        the backward pass. Logits are divided by `temperature`, after `softcap`. Nothing is sent,
        unless FSDP2 holds the weight in parts, which are gathered: `reduce` then says what becomes
        of its gradient, as it does in `token_mean`. With `reduce` all ranks make the call, and an
        error of one of them is told to the others, also where the weight is whole.

        statistics  what is returned besides, for each token and without gradients: "is_top1",
                    whether it is the most likely one; "mean_logits", over the vocabulary;
                    "log_sum_sq_probs", the logarithm of the sum of squared probabilities
        label       as in `attention`, where a weight is gathered: for those of several models, say
        """
        call = LossCall("log_probs", *self._of_call(reduce, label, tokens))
        # Who says `reduce` trains the weight: all ranks do, also where it is whole at the moment.
        together = reduce is not None
        together = together or any(is_of_fsdp(x, self._calls.ranks) for x in (weight, bias))
        return (log_probs_together if together else log_probs)(
            call,
            hidden_or_logits,
            tokens,
            weight,
            bias,
            ignore_index,
            statistics,
            softcap=softcap,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
        )

    @outside_compile
    @collective_call(of_object)
    def token_mean(
        self,
        values: Tensor,
        mask: Tensor,
        *,
        per: Per = "token",
        reduce: Reduce,
        data_parallel: dist.ProcessGroup | DeviceMesh | None = None,
        num_targets: int | Tensor | None = None,
        documents: Documents | None = None,
        label: str | int | None = None,
    ) -> TokenMean:
        """The mean of all ranks' values (batch, local tokens) where `mask` is true, for policy
        losses: `reduce`, `data_parallel` and the result as in `cross_entropy`. Padding does not
        count if `documents` or the sizes of this object say where it is.

        per="sequence": the mean over documents of the mean over each document's tokens. `documents`
        says where they lie; those in which the mask is false do not count. `num_targets` then
        counts sequences, of all accumulated batches.
        """
        shards = None
        if per == "sequence" or documents is not None or self._calls.fixed is not None:
            shards = self._calls.shards(documents)
        if per == "token" and documents is None and shards is not None:
            fits = getattr(values, "shape", ())[1:] == (shards.q_layout.slots,)
            shards = shards if fits else None  # of a batch whose documents are not said
        means = self._means("token_mean", reduce, data_parallel, num_targets, label, mask)
        return token_mean(means, values, mask, per=per, shards=shards)

    def keep_attention(
        self, *, offload: bool = False, host_bytes: int | None = None
    ) -> KeepAttention:
        """Activation checkpoints that keep the results of attention and compute the rest again, so
        that attention's forward pass runs and communicates once.

            keep = cp.keep_attention()  # once, for all blocks and steps
            out = checkpoint(block, x, use_reentrant=False, context_fn=keep)
            out = checkpoint(keep.reentrant(block), x, use_reentrant=True)

        It keeps out and lse of all objects' calls; q, k and v are computed and exchanged again in
        the backward pass. All ranks must do the same. With `offload`, what is kept and the inputs
        of blocks go to pinned host memory, and come back one block ahead of their use; what exceeds
        `host_bytes` stays on the device. `keep.host` says how much there is. The `checkpoint` may
        stand in compiled code, without `offload`, or around it.
        """
        if is_dynamo_compiling():  # which makes no objects of a class derived from `partial`
            return partial(in_compiled_code, offload or host_bytes is not None)  # type: ignore[return-value]
        return KeepAttention(offload=offload, host_bytes=host_bytes)

    def tiled(
        self, block: Callable[[Tensor], Tensor], *, tokens: int = 4096
    ) -> Callable[[Tensor], Tensor]:
        """Runs an MLP, or another block that looks at each token by itself, on `tokens` of (...,
        tokens, width) at a time, so that its intermediate values are those of one tile.

            self.tiled_mlp = cp.tiled(self.mlp)  # in a model, or from outside:
            layer.mlp.forward = cp.tiled(layer.mlp.forward)  # also if fully_shard has it

        The backward pass computes each tile again. Results equal those of the whole block up to
        rounding; gradients of parameters are sums over tiles, in float32 or wider. Modules that mix
        tokens are refused; functions that do are not detected.
        """
        return Tiled(block, tokens)

    def _means(
        self,
        name: str,
        reduce: Reduce,
        data_parallel: dist.ProcessGroup | DeviceMesh | None,
        num_targets: int | Tensor | None,
        label: str | int | None,
        of_batch: Any,
    ) -> Means:
        of_call = self._of_call(reduce, label, of_batch)
        return Means(name, *of_call, data_parallel, num_targets)

    def _of_call(
        self, reduce: Reduce | None, label: str | int | None, of_batch: Any
    ) -> tuple[User, CallOptions, Reduce | None, str | int | None, BatchIdentity | None]:
        """Fields of a `LossCall`; `of_batch` says of which, where shard_batch made it."""
        mark = getattr(of_batch, MARK, None)
        batch = mark and BatchIdentity(*mark)
        return self._calls.user, self._calls.options, reduce, label, batch

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
        for this thread, and the innermost block counts. In eager code the name of the module that
        calls is the label of the call. Backward may come after the block; with activation
        checkpointing, which attends again, it belongs inside, or is refused.
        """
        return replaced_attention(
            self._calls,
            () if buffers is None else buffers,
            () if buffer_seq_dims is None else buffer_seq_dims,
            () if no_restore_buffers is None else no_restore_buffers,
            documents,
        )
