"""Seconds of a training step on one GPU: attention by the simulator, the rest by rates.

Matrix products run at the cluster's rate for large ones, elementwise work at that of memory.
Transfers of parameters and copies to the host run beside a block's computation; what is longer than
that is exposed.
"""

from __future__ import annotations

from typing import NamedTuple

from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.tables import ClusterError
from mesh_attention.machine.transfer_time import GroupShape, ring_seconds
from mesh_attention.step.layer_attention import LayerAttention
from mesh_attention.step.model_shapes import ModelShape
from mesh_attention.step.step_memory import BF16, FP32, Keeps, Policy

_OPTIMIZER_BYTES = 28  # a parameter: AdamW reads four fp32 numbers and writes three


class StepTime(NamedTuple):
    """Seconds of a step. Of transfers of parameters and of copies to the host (`offload`) only what
    is exposed counts."""

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
    """Of so many sequences, one after the other on the same ranks."""
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
