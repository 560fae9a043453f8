"""Attention on one block of queries and keys, forward and backward, behind one interface.

`choose` picks a kernel for a `Request`; the kernel's results on several blocks are joined by
the functions of `merge.py`. The slow truth they are all tested against is `reference`.
"""

from mesh_attention.kernels.interface import (
    BlockMask,
    Causal,
    Full,
    Kernel,
    MaskKind,
    Request,
    RowRange,
    kind_of,
)
from mesh_attention.kernels.merge import delta, merge_into, merge_lse, rescale
from mesh_attention.kernels.registry import (
    Choice,
    KernelRefusedError,
    UnknownKernelError,
    choose,
    kernel_names,
    register,
    unregister,
)
from mesh_attention.kernels.rows import RowChoice, RowKernels, choose_rows

__all__ = [
    "BlockMask",
    "Causal",
    "Choice",
    "Full",
    "Kernel",
    "KernelRefusedError",
    "MaskKind",
    "Request",
    "RowChoice",
    "RowKernels",
    "RowRange",
    "UnknownKernelError",
    "choose",
    "choose_rows",
    "delta",
    "kernel_names",
    "kind_of",
    "merge_into",
    "merge_lse",
    "register",
    "rescale",
    "unregister",
]
