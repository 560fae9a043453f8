"""A whole call as a CUDA graph: inputs are copied in, the graph is replayed, results copied out.

Replaying launches everything at once, so the host's cost of a call no longer depends on the number
of its operations. What is captured must live on streams alone: NCCL does, gloo does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["CapturedCall"]

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class CapturedCall:
    """`memory` is what the call uses besides its tensors (the workspace): it must stay where it is
    for as long as the graph is replayed."""

    def __init__(self, call: Call, inputs: Mapping[str, Tensor], memory: object) -> None:
        self._inputs = {name: x.clone() for name, x in inputs.items()}
        self._memory = memory
        call(self._inputs)  # kernels are compiled and connections made outside the capture
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on using CUDA meanwhile; NCCL's own does.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = call(self._inputs)

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, x in self._inputs.items():
            x.copy_(inputs[name])
        self._graph.replay()
        return {name: x.clone() for name, x in self._outputs.items()}
