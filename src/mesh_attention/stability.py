"""Which public names are stable and which are experimental; `CONTRIBUTING.md` says what that means.

A stable name keeps its arguments and meaning until the next major version. An experimental one may
change in any minor version; its docstring says so. A module stands for all that it exports. What is
neither here nor inside of a name here is internal.
"""

from __future__ import annotations

_OF_OBJECT = "mesh_attention.ContextParallel."
STABLE = frozenset(
    {
        "mesh_attention.ContextParallel",
        "mesh_attention.ContextParallelAttention",
        "mesh_attention.Mask",
        "mesh_attention.MeshAttentionError",
        "mesh_attention.Plan",
        "mesh_attention.Problem",
        "mesh_attention.__version__",
        "mesh_attention.count",
        "mesh_attention.make_plan",
        "mesh_attention.mesh_attention",
        "mesh_attention.release",
        "mesh_attention.verify",
        "mesh_attention.testing",
    }
) | {
    _OF_OBJECT + name
    for name in (
        *("attention", "shard", "unshard", "positions", "padding", "rank", "check", "close"),
        *("shard_batch", "documents", "prefetch", "check_positions", "context_parallel"),
        *("cross_entropy", "linear_cross_entropy", "log_probs", "token_mean"),
        *("keep_attention", "tiled", "plan", "choice", "verify", "volume", "memory"),
    )
}
EXPERIMENTAL = frozenset(
    {
        "mesh_attention.plan_step",
        "mesh_attention.register_kernel",
        "mesh_attention.unregister_kernel",
        "mesh_attention.cost",
        "mesh_attention.kernels",
        "mesh_attention.huggingface",
    }
) | {_OF_OBJECT + name for name in ("packer", "traffic", "kernels", "transports")}
