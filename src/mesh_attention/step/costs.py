"""Seconds and bytes of a training step on one GPU, under a `Policy` of what its blocks keep for the
backward pass. `splits.py` compares splits and policies by them.

Attention of a layer is chosen as `ContextParallel` does (`find_default`), and timed by the
simulator. The rest goes by rates of the cluster: matrix products by its rate for large ones,
elementwise work by that of memory. Transfers of parameters and copies to the host run beside a
block's computation; only what takes longer than that (is exposed) counts.

Memory is that of full fine-tuning with FSDP2 over all ranks: fp32 weights, gradients and AdamW,
sharded; computation and gathered weights in bf16. The peak is at one of four moments: the backward
pass of a block at its attention, at its MLP, or the loss, each beside what the other layers keep;
or the end, when gradients of embedding and head are reduced and nothing is kept any more.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from mesh_attention.choose.auto import PlanChoice, find_default
from mesh_attention.cost.timeline import Timeline
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.seconds import GroupShape, ring_seconds
from mesh_attention.machine.tables import ClusterError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AttendBackward
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import kept_bytes
from mesh_attention.step.model_shapes import ModelShape

BF16, FP32 = 2, 4
RESERVED_BYTES = 2 << 30  # assumed: CUDA's context, NCCL's buffers, what the allocator cannot use
_BLOCKS_IN_FLIGHT = 2  # on their way to the host or back
_TILE_TOKENS = 8192  # of a tiled MLP: products as fast as whole ones
_LOGITS_BYTES = 1 << 30  # of logits that the loss makes at a time
_OPTIMIZER_BYTES = 28  # a parameter: AdamW reads four fp32 numbers and writes three


class LayerAttention(NamedTuple):
    """Attention of a layer. Seconds and bytes are those of the rank with the most.

    local_tokens     rows of a shard, padding included
    flops            of all ranks forward, by the area of the mask; backward has 2.5 times as many
    held_bytes       between the passes, with the caller's tensors; 0 with `keeps_shards`, as these
                     are computed again
    backward_bytes   at the peak of the backward pass, with the caller's tensors
    workspace_bytes  the part of it that is not the caller's: buffers and kernels
    """

    choice: PlanChoice
    local_tokens: int
    flops: float
    forward_seconds: float
    backward_seconds: float
    held_bytes: int
    backward_bytes: int
    workspace_bytes: int


def layer_attention(
    problem: Problem, num_ranks: int, cluster: Cluster, *, keeps_shards: bool
) -> LayerAttention:
    """`keeps_shards`: the forward pass leaves only out and lse, which a checkpoint keeps. Otherwise
    it also leaves tensors exchanged for heads, which the backward pass need not exchange again."""
    choice = find_default(problem, num_ranks, cluster, {"keep": "shards"} if keeps_shards else {})
    forward, backward = (choice.timeline(direction) for direction in Direction)
    plan, kernel = choice.plan(), _kernel_bytes(backward)
    return LayerAttention(
        choice,
        plan.q_layout.slots,
        forward.flops,
        forward.runtime_seconds,
        backward.runtime_seconds,
        0 if keeps_shards else kept_bytes(plan).held_bytes,
        backward.peak_bytes + kernel,
        backward.workspace_bytes + kernel,
    )


def _kernel_bytes(backward: Timeline) -> int:
    """Memory of the largest call: its results, and fp32 sums of dq, and of dk and dv where query
    heads share them (as `scratch_bytes` of the fastest backward kernel counts)."""
    problem, programs = backward.plan.problem, backward.pass_.programs
    program = programs[len(programs) // 2]
    table, largest = program.buffer_table(), 0
    for op in program.operations:
        if not isinstance(op, AttendBackward):
            continue
        heads, kv_heads = (piece.num_heads(table[piece.buffer]) for piece in (op.q, op.k))
        for call in op.calls:
            dq = (call.q_stop - call.q_start) * heads * problem.head_dim
            dkv = (call.k_stop - call.k_start) * kv_heads * (problem.head_dim + problem.v_dim)
            sums = 4 * (dq + (dkv if heads != kv_heads else 0))
            largest = max(largest, problem.element_bytes * (dq + dkv) + sums)
    return largest


class Keeps(StrEnum):
    """Activations that a block keeps between its passes; others are computed again."""

    EVERYTHING = "everything"
    INPUTS = "block inputs"
    ATTENTION = "inputs, out"  # and lse: attention is not computed again
    HOST = "inputs, out on host"


class Policy(NamedTuple):
    """`tile_tokens` 0: the MLP is not tiled."""

    keeps: Keeps
    tile_tokens: int

    @property
    def keeps_attention(self) -> bool:
        return self.keeps in (Keeps.ATTENTION, Keeps.HOST)

    @property
    def text(self) -> str:
        return f"{self.keeps}{'; tiled MLP' if self.tile_tokens else ''}"


def policies(local_tokens: int) -> list[Policy]:
    """From the least to switch on to the most."""
    tiles = (0, _TILE_TOKENS) if local_tokens > _TILE_TOKENS else (0,)
    return [Policy(keeps, tile) for keeps in Keeps for tile in tiles]


class StepMemory(NamedTuple):
    """Bytes of one GPU. `at_...` are what the moments add to the fields before them; `host` is this
    GPU's part of its host's memory."""

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
        """The name of the moment with the most memory, and the bytes of everything then."""
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
    to_attention = hidden + (q + kv if model.qk_norm else 0)
    to_mlp = 2 * hidden  # the residual and the second norm's result
    products = 0 if policy.tile_tokens else 4 * middle  # gate, up, its activation, their product
    # While the product of gate and up goes backward: both, the activation, three gradients, and one
    # more, as replays on a GPU have it.
    at_mlp = 7 * BF16 * (policy.tile_tokens or tokens) * model.intermediate + 2 * hidden
    at_attention = hidden + attention.backward_bytes
    kept_attention = others = 0
    if keeps is Keeps.EVERYTHING:
        kept_attention, others = attention.held_bytes, to_attention + to_mlp + products
        at_mlp -= products
    else:
        at_attention += to_attention
        kept_attention = out if policy.keeps_attention else 0
        at_mlp += to_attention + to_mlp + q + 2 * kv + out - kept_attention
    layers = min(_BLOCKS_IN_FLIGHT, model.layers) if keeps is Keeps.HOST else model.layers
    # bf16 gradients of a block, fp32 sums of the one before it, the head's gradient.
    in_flight = (BF16 + FP32) * model.block_parameters + BF16 * model.head_parameters
    logits = min(2 * FP32 * tokens * model.vocabulary, _LOGITS_BYTES)
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


class StepTime(NamedTuple):
    """Seconds of a step. `parameters` (transfers) and `offload` (copies to the host) are not in
    `total`: only what is exposed of them counts."""

    attention_forward: float
    attention_again: float
    attention_backward: float
    linear_layers: float
    loss: float
    elementwise: float
    optimizer: float
    exposed_parameters: float
    exposed_offload: float
    parameters: float
    offload: float

    @property
    def total(self) -> float:
        return sum(self) - self.parameters - self.offload


def step_time(
    model: ModelShape,
    attention: LayerAttention,
    policy: Policy,
    cluster: Cluster,
    num_ranks: int,
    sequences: int,
) -> StepTime:
    """Seconds of a step on this number of sequences, one after the other on the same ranks."""
    rates, tokens, links = cluster.step, attention.local_tokens, cluster.links
    if rates is None:
        raise ClusterError(
            f"{cluster.name} has no [step] table: a step needs matmul_tflops, host_gb_per_second "
            "and host_memory_gib; add them to its file (docs/clusters.md)"
        )
    shape = GroupShape.of(links, tuple(range(num_ranks)))

    def products(parameters: int) -> float:
        return 2.0 * tokens * parameters / (rates.matmul_tflops * 1e12)

    def touching(elements: int) -> float:
        return BF16 * tokens * elements / (cluster.gpu.memory_gb_per_second * 1e9)

    def ring(parameters: int, element_bytes: int) -> float:
        return ring_seconds(links, shape, -(-parameters // num_ranks) * element_bytes)

    # Elements of a token that activations, norms, rotations and residuals read and write forward.
    of_mlp = products(model.mlp_parameters), touching(5 * model.intermediate)
    others = touching(10 * model.hidden + 8 * (model.q_width + model.kv_width))
    linear, elementwise = products(model.block_parameters), of_mlp[1] + others
    # Backward is twice forward, after a recomputation; a tiled MLP computes each tile once more.
    rounds, tiled = 2 + (policy.keeps is not Keeps.EVERYTHING), bool(policy.tile_tokens)
    linear_back, elementwise_back = (
        rounds * all_parts + tiled * mlp
        for all_parts, mlp in zip((linear, elementwise), of_mlp, strict=True)
    )
    again = attention.forward_seconds if policy.keeps is Keeps.INPUTS else 0.0
    forward = attention.forward_seconds + linear + elementwise
    backward = again + attention.backward_seconds + linear_back + elementwise_back

    gather, reduce = ring(model.block_parameters, BF16), ring(model.block_parameters, FP32)
    outer = ring(model.outer_parameters, BF16) + ring(model.outer_parameters, FP32)
    # Nothing hides the first gather and the last reduction.
    exposed = outer + gather + (model.layers - 1) * max(0.0, gather - forward)
    exposed += reduce + (model.layers - 1) * max(0.0, gather + reduce - backward)
    kept = BF16 * (model.hidden + model.q_width) + FP32 * model.num_heads
    copy = tokens * kept / (rates.host_gb_per_second * 1e9) if policy.keeps is Keeps.HOST else 0.0
    layers = sequences * model.layers
    return StepTime(
        attention_forward=layers * attention.forward_seconds,
        attention_again=layers * again,
        attention_backward=layers * attention.backward_seconds,
        linear_layers=layers * (linear + linear_back),
        loss=sequences * 3 * products(model.head_parameters),
        elementwise=layers * (elementwise + elementwise_back),
        optimizer=_OPTIMIZER_BYTES
        * model.parameters
        / num_ranks
        / (cluster.gpu.memory_gb_per_second * 1e9),
        exposed_parameters=sequences * exposed,
        exposed_offload=layers * (max(0.0, copy - forward) + max(0.0, copy - backward)),
        parameters=sequences * (outer + model.layers * (2 * gather + reduce)),
        offload=2 * layers * copy,
    )
