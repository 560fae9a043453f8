"""The methods of `ContextParallel` for training besides attention: losses over all ranks, ways to
save memory, and a block in which PyTorch's own attention runs over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.train.keep_attention import KeepAttention, in_compiled_code
from mesh_attention.train.loss_kernels import LossKernel
from mesh_attention.train.losses import cross_entropy
from mesh_attention.train.means import LossCall, Means, Reduce, TokenMean
from mesh_attention.train.policy import Per, log_probs, log_probs_together, token_mean
from mesh_attention.train.replaced_attention import replaced_attention
from mesh_attention.train.sharded_batch import IGNORE_INDEX
from mesh_attention.train.sharded_weight import is_of_fsdp
from mesh_attention.train.tiled import Tiled
from mesh_attention.train.whole_batch import batch_of

P = ParamSpec("P")
R = TypeVar("R")
_REDUCE = 'reduce is "ddp", "fsdp" or "sum", as your code reduces gradients'
_LOSS = f"{_REDUCE}; for weights of classes or tokens take token_mean of losses of your own"
_MEAN = f"{_REDUCE}, and mask says which values count, as batch.labels != -100"


def _called_with(rule: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a method: Python's error for arguments that it lacks, or does not take, says the
    rule for them too."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # in the function
                raise MeshAttentionError(f"{error}: {rule}") from None

        return called

    return decorate


class Training:
    """A base of `ContextParallel`, which sets `_calls`."""

    _calls: ObjectCalls

    @outside_compile
    @collective_call(of_object)
    @_called_with(_LOSS)
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

        reduce          how your code reduces gradients over all ranks: "ddp" or "fsdp" if it
                        averages them, "sum" if it adds them up
        data_parallel   the ranks that hold the same tokens of other batches (`mesh["dp"]`), or a
                        group of all ranks. Gradients must be reduced over exactly these and the
                        ranks of this object
        num_targets     if gradients of several batches are accumulated: the number of targets of
                        all these batches on all ranks, data-parallel ranks included
        kernel          "liger": Liger's kernel for losses (the extra `liger`); "plain": PyTorch's
                        operators; None: the first that can. `kernels()` says which, and why
        label           as in `attention`, for several losses of one batch

        With S the sum over this rank's targets, N the number of all targets and R the number of all
        ranks, `.loss` is S / N for "sum", else S R / N. Sums are float64, 16-bit logits become
        float32, and gradients are computed in the forward pass. The cost is one all-reduce of ten
        numbers over each group. If ranks or replicas call with different arguments, all get an
        error, or on CUDA a loss of NaN.
        """
        how = reduce, label, batch_of(targets), data_parallel, num_targets
        means = Means("cross_entropy", self._calls, *how)
        return cross_entropy(
            means, logits, targets, None, kernel, ignore_index, label_smoothing=label_smoothing
        )

    @outside_compile
    @collective_call(of_object)
    @_called_with(_LOSS)
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
        """`cross_entropy` of the logits `hidden @ weight.T + bias`, computed a chunk of tokens at a
        time. `hidden` is (batch, local tokens, width), `weight` (vocabulary, width).

        softcap         logits become softcap * tanh(logits / softcap)
        low_rank        two factors, (batch, local tokens, few) and (vocabulary, few), whose product
                        is added to the logits. LoRA: (scaling * lora_A(hidden), lora_B.weight)
        z_loss          z_loss * log-sum-exp(logits)^2 is added to the loss of each target
        chunk_tokens    tokens in a chunk; None: as many as have 1 GiB of logits

        If FSDP2 shards the weight, it is gathered, and its gradient is reduced to the shards as
        `reduce` says, over the ranks of FSDP2: those of this object and of `data_parallel`. Inside
        the forward of the module that holds the weight, FSDP2 has gathered it already.

        Gradients are computed in the forward pass, the weight's in float32, and scaled in the
        backward pass; under `torch.no_grad` or for a frozen weight they are not computed. Under
        autocast products have its dtype, to which the weight is copied. Sums and logits are float32
        or wider; with Liger's kernel logits have the dtype of products, as in `nn.Linear`.
        """
        how = reduce, label, batch_of(labels), data_parallel, num_targets
        return cross_entropy(
            Means("linear_cross_entropy", self._calls, *how),
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
        """Log-probabilities of this rank's tokens (batch, local tokens), for instance the labels of
        `shard_batch`, and entropies. Both are differentiable, and 0 for tokens of `ignore_index`.

        Takes logits, or hidden states and a `weight`: then logits are computed in chunks, and again
        in the backward pass. Logits are divided by `temperature`, after `softcap`. Nothing is sent,
        unless FSDP2 shards the weight: it is gathered, and its gradient reduced as `reduce` says.
        With `reduce` all ranks make the call, sharded weight or not, and an error reaches all.

        statistics  further results for each token, without gradients: "is_top1", whether the token
                    is the most likely; "mean_logits", over the vocabulary; "log_sum_sq_probs", the
                    logarithm of the sum of squared probabilities
        label       as in `attention`, if a weight is gathered: tells apart calls of several models
        """
        call = LossCall("log_probs", self._calls, reduce, label, batch_of(tokens))
        # With `reduce` the weight is trained, on all ranks, even if it is whole at the moment.
        ranks = self._calls.ranks
        together = reduce is not None or any(is_of_fsdp(x, ranks) for x in (weight, bias))
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
    @_called_with(_MEAN)
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
        says where the documents lie; documents whose mask is all false do not count. `num_targets`
        is then the number of sequences in all accumulated batches.
        """
        shards = None
        if per == "sequence" or documents is not None or self._calls.fixed is not None:
            shards = self._calls.shards(documents)
        if per == "token" and documents is None and shards is not None:
            fits = getattr(values, "shape", ())[1:] == (shards.q_layout.slots,)
            shards = shards if fits else None  # else the values are of a batch with documents
        how = reduce, label, batch_of(mask), data_parallel, num_targets
        means = Means("token_mean", self._calls, *how)
        return token_mean(means, values, mask, per=per, shards=shards)

    def keep_attention(
        self, *, offload: bool = False, host_bytes: int | None = None
    ) -> KeepAttention:
        """Activation checkpointing that keeps the results of attention and recomputes the rest, so
        that attention's forward pass runs and communicates once.

            keep = cp.keep_attention()  # once, for all blocks and steps
            out = checkpoint(block, x, use_reentrant=False, context_fn=keep)
            out = checkpoint(keep.reentrant(block), x, use_reentrant=True)

        It keeps out and lse of all objects' calls; q, k and v are computed and exchanged again in
        the backward pass. All ranks must do the same. With `offload`, kept results and the inputs
        of blocks go to pinned host memory, at most `host_bytes`, and come back one block ahead of
        their use; the rest stays on the device. `keep.host` says how much is on the host.
        `checkpoint` may be called around compiled code or, without `offload`, inside it.
        """
        if is_dynamo_compiling():  # Dynamo makes no objects of a class derived from `partial`
            return partial(in_compiled_code, offload or host_bytes is not None)  # type: ignore[return-value]
        return KeepAttention(offload=offload, host_bytes=host_bytes)

    def tiled(
        self, block: Callable[[Tensor], Tensor], *, tokens: int = 4096
    ) -> Callable[[Tensor], Tensor]:
        """Runs an MLP, or another block that treats each token by itself, on a tile of `tokens`
        tokens of (..., tokens, width) at a time, so that intermediate values exist for one tile.

            self.tiled_mlp = cp.tiled(self.mlp)  # in a model, or from outside:
            layer.mlp.forward = cp.tiled(layer.mlp.forward)  # also if fully_shard has it

        The backward pass computes each tile again. Results equal those of the whole block up to
        rounding; gradients of parameters are sums over tiles, in float32 or wider. Modules that mix
        tokens are refused; functions that do are not detected.
        """
        return Tiled(block, tokens)

    def context_parallel(
        self,
        *,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
        documents: Documents | None = None,
    ) -> AbstractContextManager[Documents | None]:
        """A block in which `torch.nn.functional.scaled_dot_product_attention` attends over all
        ranks. Takes the arguments of PyTorch's `context_parallel`.

            with cp.context_parallel(buffers=[ids, positions], buffer_seq_dims=[1, 0]) as documents:

        buffers             whole tensors, the same on all ranks. In the block they hold this rank's
                            part; after it, even by an exception, they are restored. The first says
                            the length if the object does not; it must need no padding
        buffer_seq_dims     the dimension of the tokens of each buffer
        no_restore_buffers  buffers that keep this rank's part after the block
        documents           of this batch, if it has several. `as` gives these, or documents made
                            from the length, for `unshard` and inner blocks

        Calls have (batch, heads, local_seq, head_dim) and may say `scale`, `enable_gqa` and an
        `is_causal` that is the object's; attn_mask and dropout are refused on all ranks. The block
        holds for this thread; of nested blocks the innermost counts. In eager code the name of the
        calling module is the label of the call. The backward pass may come after the block, except
        with activation checkpointing, which attends again: then it must be inside, or is refused.
        """
        return replaced_attention(
            self._calls,
            () if buffers is None else buffers,
            () if buffer_seq_dims is None else buffer_seq_dims,
            () if no_restore_buffers is None else no_restore_buffers,
            documents,
        )
