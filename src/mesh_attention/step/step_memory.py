"""Bytes of a training step on one GPU and its host, part by part.

Full fine-tuning with FSDP2 over all ranks: fp32 weights, gradients and AdamW, sharded; compute and
gathered weights in bf16. Moments that compete for the peak: the backward pass of one block at its
attention and at its MLP, and the loss, all of them beside what the other layers keep; and the end,
when gradients of embedding and head are reduced and nothing is kept any more.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from mesh_attention.step.layer_attention import LayerAttention
from mesh_attention.step.model_shapes import ModelShape

BF16, FP32 = 2, 4
RESERVED_BYTES = 2 << 30  # assumed: CUDA's context, NCCL's buffers, what the allocator cannot use
_BLOCKS_IN_FLIGHT = 2  # on their way to the host or back
_TILE_TOKENS = 8192  # of a tiled MLP: products as fast as whole ones
_LOGITS_BYTES = 2 << 30  # at most, for two chunks of the loss


class Keeps(StrEnum):
    """What stays of a block between its passes; what does not is computed again."""

    EVERYTHING = "everything"
    INPUTS = "block inputs"
    ATTENTION = "inputs, out"  # and lse: attention is not computed again
    HOST = "inputs, out on host"


class Policy(NamedTuple):
    """`tile_tokens` 0: the MLP is not tiled."""

    keeps: Keeps
    tile_tokens: int
    chunk_tokens: int

    @property
    def keeps_attention(self) -> bool:
        return self.keeps in (Keeps.ATTENTION, Keeps.HOST)

    @property
    def text(self) -> str:
        return f"{self.keeps}{'; tiled MLP' if self.tile_tokens else ''}"


def policies(model: ModelShape, local_tokens: int) -> list[Policy]:
    """From the least to switch on to the most."""
    chunk = 256
    while chunk < local_tokens and 4 * FP32 * chunk * model.vocabulary <= _LOGITS_BYTES:
        chunk *= 2
    tiles = (0, _TILE_TOKENS) if local_tokens > _TILE_TOKENS else (0,)
    return [Policy(keeps, tile, chunk) for keeps in Keeps for tile in tiles]


class StepMemory(NamedTuple):
    """Bytes of one GPU. `at_...` are the moments, besides all that is named before them; `host` is
    this GPU's part of its host's memory."""

    weights: int
    gradients: int
    optimizer: int
    gathered_weights: int
    reserved: int
    block_inputs: int
    kept_attention: int
    other_activations: int
    at_attention: int
    at_mlp: int
    at_loss: int
    at_end: int
    host: int

    @property
    def peak(self) -> tuple[str, int]:
        """The moment, and the bytes of everything then."""
        fixed, kept = sum(self[:5]), sum(self[5:8])
        moments = dict(zip(self._fields[8:11], self[8:11], strict=True))
        moments["at_end"] = max(0, self.at_end - kept)
        moment = max(moments, key=moments.__getitem__)
        return moment, fixed + kept + moments[moment]


def step_memory(
    model: ModelShape, attention: LayerAttention, policy: Policy, num_ranks: int
) -> StepMemory:
    keeps, tokens = policy.keeps, attention.local_tokens
    shard = -(-model.parameters // num_ranks)
    widths = model.hidden, model.q_width, model.kv_width, model.intermediate
    hidden, q, kv, middle = (BF16 * tokens * width for width in widths)
    out = q + FP32 * tokens * model.num_heads  # with lse
    # Of a block that goes backward: the first norm's result, and q and k before their own norms.
    before = hidden + (q + kv if model.qk_norm else 0)
    between = 2 * hidden  # the residual and the second norm's result
    products = 0 if policy.tile_tokens else 4 * middle  # gate, up, its activation, their product
    # While the product of gate and up goes backward: both, the activation, three gradients, and one
    # more, as replays on a GPU have it.
    at_mlp = 7 * BF16 * (policy.tile_tokens or tokens) * model.intermediate + 2 * hidden
    at_attention = hidden + attention.backward_bytes
    kept_attention = others = 0
    if keeps is Keeps.EVERYTHING:
        kept_attention, others = attention.held_bytes, before + between + products
        at_mlp -= products
    else:
        at_attention += before
        kept_attention = out if policy.keeps_attention else 0
        at_mlp += before + between + q + 2 * kv + out - kept_attention
    layers = min(_BLOCKS_IN_FLIGHT, model.layers) if keeps is Keeps.HOST else model.layers
    # bf16 gradients of a block, fp32 sums of the one before it, the head's gradient.
    in_flight = (BF16 + FP32) * model.block_parameters + BF16 * model.head_parameters
    logits = 2 * FP32 * policy.chunk_tokens * model.vocabulary
    return StepMemory(
        weights=FP32 * shard,
        gradients=FP32 * shard,
        optimizer=2 * FP32 * shard,
        gathered_weights=BF16 * (model.outer_parameters + 2 * model.block_parameters),
        reserved=RESERVED_BYTES,
        block_inputs=layers * hidden,
        kept_attention=layers * kept_attention,
        other_activations=layers * others,
        at_attention=in_flight + at_attention - kept_attention,
        at_mlp=in_flight + at_mlp,
        at_loss=3 * hidden + FP32 * model.head_parameters + logits,
        at_end=hidden + (BF16 + FP32) * model.outer_parameters,
        host=model.layers * (hidden + out) if keeps is Keeps.HOST else 0,
    )
