"""The most memory that tensors made in a block held at a time, on any device, operator after
operator: what is inside an operator is not seen."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveMemory"]


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`peak_bytes` leaves out what was there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._bytes: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._know((args, kwargs), new=False)
        result = op(*args, **(kwargs or {}))
        # Those that are gone are forgotten before another takes their address.
        self._bytes = {key: x for key, x in self._bytes.items() if not x[0].expired()}
        self._know(result, new=True)
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._bytes.values()))
        return result

    def _know(self, tensors: Any, *, new: bool) -> None:
        for x in tree_leaves(tensors):
            if isinstance(x, torch.Tensor):
                storage: Any = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
                size = x.untyped_storage().nbytes() if new else 0
                self._bytes.setdefault(storage.cdata, (storage, size))
