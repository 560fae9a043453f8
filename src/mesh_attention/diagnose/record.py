"""Records what modules and attention compute in a forward pass: a few numbers of every token.

`runs.py` runs a step of training under a `Recorder`, on ranks and in a single process. Both run the
same modules, so `doctor.py` compares the records name by name, in the order of computation: the
input of each module that has no submodules, the output of every module, and q, k, v and the result
of attention. Dropout is left out: ranks draw other random numbers than a single process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mesh_attention.request.operators import attention_op

_NUMBERS_PER_TOKEN = 8
LOW_PRECISION = (torch.bfloat16, torch.float16)


class Recorder(TorchFunctionMode):
    """Records while `is_on`, inside `with recorder, recorder.of(model)`.

    sizes        (rows, tokens) of the whole batch; None on ranks, which have `like`
    like         the record of a single process; its `dims` hold for this record too
    perturbs     whether outputs of modules in low precision are rounded up or down at random, to
                 see what rounding alone changes
    seen         (rows, tokens, a few numbers) by name, in the order of computation
    dims         which dimension of each recorded tensor is that of the tokens, by name
    outputs      the latest output of a module with three dimensions: logits, for most models
    dtypes       of all floating-point tensors that functions returned
    heads_first  the first module that called attention with (batch, heads, tokens, head_dim)
    of_pytorch   the first module that called PyTorch's attention, which knows nothing of ranks
    dropouts     the modules whose dropout was left out
    """

    def __init__(self, sizes: Any, like: Recorder | None = None, perturbs: bool = False) -> None:
        super().__init__()
        self.sizes, self.like, self.is_on = sizes, like, False
        self.seen: dict[str, Tensor] = {}
        self.dims: dict[str, int] = {}
        self.dtypes: set[torch.dtype] = set()
        self.outputs: Tensor | None = None
        self.heads_first: str | None = None
        self.of_pytorch: str | None = None
        self.dropouts: dict[str, None] = {}
        self.perturbs = perturbs
        self._tokens = None if sizes is None else sizes[1]
        self._calls: Counter[str] = Counter()
        self._inside: list[str] = []

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Hooks the modules of a model. After the forward pass `runs.py` sets `is_on` to False, so
        that what checkpointing computes again is not recorded again."""
        hooks: list[Any] = []
        for name, module in model.named_modules():
            name, is_leaf = name or type(module).__name__, not any(module.children())
            hooks += [
                module.register_forward_pre_hook(partial(self._begin, name, is_leaf)),
                module.register_forward_hook(partial(self._end, name, is_leaf)),
            ]
        self.is_on = True
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, name: str, is_leaf: bool, module: nn.Module, inputs: Any) -> None:
        self._inside.append(name)
        if is_leaf:
            self._keep_first(f"{name}: input", inputs)

    def _end(self, name: str, is_leaf: bool, module: nn.Module, inputs: Any, output: Any) -> Any:
        self._inside.pop()
        tensor = self._keep_first(name, output)
        if tensor is not None:
            self.outputs = tensor.detach() if tensor.ndim == 3 else self.outputs
        return tree_map_only(Tensor, _perturbed, output) if self.perturbs and is_leaf else None

    def _keep_first(self, name: str, tensors: Any) -> Tensor | None:
        """Records the first floating-point tensor of at least two dimensions, and returns it."""
        leaves = [x for x in tree_leaves(tensors) if isinstance(x, Tensor)]
        tensor = next((x for x in leaves if x.is_floating_point() and x.ndim >= 2), None)
        if tensor is None or not self.is_on:
            return None
        self._keep(name, tensor)
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = self._inside[-1] if self._inside else "the step"
        if func is functional.dropout:
            arguments = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            if arguments.get("p", 0.5) and arguments.get("training", True):
                self.dropouts[where] = None
                return arguments["input"]
        out = func(*args, **kwargs)
        if self.is_on and isinstance(out, Tensor) and out.is_floating_point():
            self.dtypes.add(out.dtype)
        is_sdpa = func is functional.scaled_dot_product_attention
        self.of_pytorch = self.of_pytorch or (where if is_sdpa else None)
        if self.is_on and len(args) >= 3 and (is_sdpa or func is attention_op):
            tensors = (*args[:3], out if is_sdpa else out[0])
            for name, x in zip(("q", "k", "v", "result"), tensors, strict=True):
                x = x.detach().transpose(1, 2) if is_sdpa else x.detach()
                if self._tokens and x.shape[1] != self._tokens == x.shape[2]:
                    self.heads_first = self.heads_first or where
                self._keep(f"{where}: {name} of attention", x[:, :, 0])
        return out

    def _keep(self, name: str, x: Tensor) -> None:
        self._calls[name] += 1
        if self._calls[name] > 1:
            name = f"{name}, call {self._calls[name]}"
        dim = self._dim_of_tokens(name, x)
        if dim is None:
            return
        self.dims[name] = dim
        rows = x.detach()[None] if dim == 0 else x.detach().movedim(dim, 1)
        self._tokens = self._tokens or rows.shape[1]
        rows = rows.flatten(2) if rows.ndim > 2 else rows[..., None]
        step = max(1, rows.shape[2] // _NUMBERS_PER_TOKEN)
        self.seen[name] = rows[:, :, ::step][:, :, :_NUMBERS_PER_TOKEN].double().cpu()

    def _dim_of_tokens(self, name: str, x: Tensor) -> int | None:
        """The dimension of the tokens: 1 in (rows, tokens, ...), 0 in (tokens, width), the last in
        (rows, channels, tokens) of a convolution, or None. Rows may be packed into a single row."""
        if self.like is not None:
            return self.like.dims.get(name)
        assert self.sizes is not None
        lengths = self.sizes[1], self.sizes[0] * self.sizes[1]
        dims = (1, 0, x.ndim - 1) if x.ndim == 2 else (1, x.ndim - 1)
        return next((dim for dim in dims if x.shape[dim] in lengths), None)


def _perturbed(x: Tensor) -> Tensor:
    if x.dtype not in LOW_PRECISION:
        return x
    steps = torch.randint(-1, 2, x.shape, device=x.device)
    return x * (1 + steps * torch.finfo(x.dtype).eps).to(x.dtype)
