"""Attention on one block of queries and keys, forward and backward, behind one interface.

`choose` picks a kernel for a `Request`; the kernel's results on several blocks are joined by
`RowKernels`. The slow truth they are all tested against is `reference`.
Experimental.
"""

from mesh_attention.kernels.interface import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockMask,
    BlockSize,
    Causal,
    CheckedCall,
    Full,
    Kernel,
    KernelResultError,
    MaskKind,
    Request,
    RowRange,
    kind_of,
)
from mesh_attention.kernels.registry import (
    Choice,
    KernelNameError,
    KernelRefusedError,
    RowChoice,
    UnknownKernelError,
    choose,
    choose_rows,
    kernel_names,
    register,
    table_version,
    unregister,
)
from mesh_attention.kernels.rows import RowKernels

__all__ = [
    "BackwardInputs", "BackwardNeeds", "Block", "BlockMask", "BlockSize", "Causal", "CheckedCall",
    "Choice", "Full", "Kernel", "KernelNameError", "KernelRefusedError", "KernelResultError",
    "MaskKind", "Request", "RowChoice", "RowKernels", "RowRange", "UnknownKernelError", "choose",
    "choose_rows", "kernel_names", "kind_of", "register", "table_version", "unregister",
]  # fmt: skip
