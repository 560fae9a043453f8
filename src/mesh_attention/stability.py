"""Which public names are stable and which experimental; `docs/versions.md` says what that means.

A stable name keeps its arguments and meaning until the next major version. An experimental one may
change in any minor version; its docstring says so. A module stands for all that it exports. What is
neither here nor inside of a name here is internal.
"""

from __future__ import annotations


def _names(place: str, words: str) -> frozenset[str]:
    return frozenset(f"{place}.{word}" for word in words.split())


_MODULE, _OBJECT = "mesh_attention", "mesh_attention.ContextParallel"
STABLE = _names(
    _MODULE,
    "ContextParallel ContextParallelAttention mesh_attention release Mask Problem Plan make_plan "
    "verify count MeshAttentionError __version__ testing",
) | _names(
    _OBJECT,
    "attention shard unshard positions padding rank check close shard_batch documents prefetch "
    "check_positions context_parallel cross_entropy linear_cross_entropy log_probs token_mean "
    "keep_attention tiled plan choice verify volume memory",
)
EXPERIMENTAL = _names(
    _MODULE, "doctor plan_step register_kernel unregister_kernel cost kernels huggingface"
) | _names(_OBJECT, "packer traffic kernels transports")
