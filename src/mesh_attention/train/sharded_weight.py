"""The weight of a head as FSDP2 has it outside of forward: in parts, on ranks with other tokens.

`own_weights` gathers it for a loss or for `log_probs`, in the dtype of the hidden states (under
autocast in its own), and its gradient is reduced to the parts as FSDP2 reduces gradients of other
parameters. Before they gather, and before they reduce, ranks compare the call. Ranks of other
replicas, which have other batches, compare what is gathered and how many such calls they have made.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.operators import need_grad
from mesh_attention.runtime.agreement.identity import GATHERED, Statement
from mesh_attention.runtime.agreement.verdict import verdict_on
from mesh_attention.runtime.session.collective_call import collective_call, of_calls
from mesh_attention.runtime.session.distributed_tensors import is_dtensor, own_copies
from mesh_attention.runtime.transport.distributed import communicating
from mesh_attention.train.means import LossCall, LossRanks, Means

_SAID_BYTES = 1024  # of what replicas compare


def own_weights(call: LossCall, hidden: Tensor, **tensors: Any) -> list[Any]:
    """Tensors of a head (some may be None) whole, in the same order: parts are gathered, others are
    as this rank holds them."""
    ranks = call.user.session.groups.ranks
    of_loss = call.ranks if isinstance(call, Means) else None
    parts = {name: x for name, x in tensors.items() if is_of_fsdp(x, ranks, of_loss)}
    others = {name: x for name, x in tensors.items() if name not in parts}
    whole = dict(zip(others, own_copies(ranks, _WAYS_OUT, **others), strict=True))
    if not parts:
        return [whole[name] for name in tensors]
    if call.reduce is None and need_grad(*parts.values()):
        raise MeshAttentionError(
            "the weight is sharded by FSDP2: say reduce='fsdp' if gradients are averaged over its "
            "ranks, reduce='sum' if they are added up"
        )
    for x in parts.values():
        if of_loss is not None and x.device_mesh.size() != of_loss.number:
            raise MeshAttentionError(
                f"the weight is sharded over the ranks {_members(x.device_mesh)}, where its "
                f"gradient is reduced, and the mean is over {of_loss.number} ranks: give the "
                "others as data_parallel"
            )
    autocast = torch.is_autocast_enabled(hidden.device.type)  # which takes any dtype
    gathering = Gathering(call, parts, None if autocast else hidden.dtype)
    gathered = _Gathered.apply(gathering, *parts.values())  # type: ignore[no-untyped-call]
    whole |= zip(parts, gathered, strict=True)
    return [whole[name] for name in tensors]


# Gathered by `full_tensor`, gradients of ranks with other tokens would be added up by nobody.
_WAYS_OUT = (
    "it whole, as it is in the forward of the module that fully_shard wraps; or x.full_tensor() if "
    "ranks of its mesh have the same tokens (tensor parallelism) or it needs no gradient; or a "
    "DTensor that is Shard(0) over the whole context-parallel group (FSDP2), or replicated"
)


def is_of_fsdp(x: Any, ranks: Collection[int], of_loss: LossRanks | None = None) -> bool:
    """Whether `x` is sharded by FSDP2: along one dimension of its mesh, over ranks with other
    tokens (the whole group `ranks`, or all ranks of the loss). On other meshes parts may belong to
    tensor parallelism."""
    if not is_dtensor(x):
        return False
    from torch.distributed.tensor import Replicate, Shard

    mesh, along = x.device_mesh, [type(p) is not Replicate for p in x.placements]
    if sum(along) != 1 or x.placements[along.index(True)] != Shard(0):
        return False
    if of_loss is not None and mesh.size() == of_loss.number > 1:
        return of_loss.known <= {*mesh.mesh.flatten().tolist()}
    here = mesh.get_coordinate()
    line = mesh.mesh[tuple(slice(None) if a else i for a, i in zip(along, here, strict=True))]
    return len(ranks) > 1 and {*ranks} <= {*line.tolist()}


def count_gathering(call: LossCall, head: Sequence[Any] | None) -> None:
    """Counts this call for the meshes of its weights, before anything can go wrong: a call that
    fails counts on all ranks. `head`: weight, bias, and a pair if there is one."""
    weights = [y for x in head or () for y in (x if isinstance(x, tuple | list) else (x,))]
    for mesh in {x.device_mesh for x in weights if is_dtensor(x)}:
        call.user.session.gathered[_members(mesh)] += 1


def _members(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


class Gathering:
    """The sharded weights of one call, in both passes.

    statement  what ranks compare of it
    numbers    by mesh, how many calls of this session have gathered there, this one included
    dtype      to gather in; None: that of each weight
    place      of the forward pass, among the calls of the group
    """

    def __init__(self, call: LossCall, parts: dict[str, Any], dtype: torch.dtype | None) -> None:
        self.call, self.dtype, self.place = call, dtype, 0
        self.statement: Statement = {}
        for name, x in parts.items():
            members = _members(x.device_mesh)
            self.statement[f"{name} in parts"] = {
                "ranks": f"{members[0]} to {members[-1]}",
                "shape": [*x.shape],
                "dtype": str(dtype or x.dtype),
                "requires_grad": need_grad(x),
            }
        gathered, meshes = call.user.session.gathered, [x.device_mesh for x in parts.values()]
        self.numbers = {mesh: gathered[_members(mesh)] for mesh in meshes}

    def meet(self, device: torch.device, *, backward: bool = False) -> Tensor:
        """Raises unless all ranks are about to move the same parts. Returns 0; on a device, for
        which the host does not wait, NaN in place of an error: callers spoil their results by it.
        """
        call, session = self.call, self.call.user.session
        call.user.refuse_if_closed()
        name = f"backward of {call.name}" if backward else call.name
        call.begin(self.statement, device, name=name, of=self.place if backward else 0)
        if not backward:
            self.place = session.guard.place
        wrong = torch.zeros(1, device=device)
        session.guard.settle((wrong,))
        for mesh, number in self.numbers.items():
            if not {*_members(mesh)} <= {*session.groups.ranks}:
                wrong += self._differ(mesh, number, name, device)
        return wrong[0]

    def _differ(self, mesh: DeviceMesh, number: int, name: str, device: torch.device) -> Tensor:
        """The same among the ranks of a mesh that are not all of the group's."""
        from torch.distributed.tensor import DTensor, Shard

        guard, members = self.call.user.session.guard, _members(mesh)
        statement = {"pass": name, "reduce": self.call.reduce, GATHERED: number} | self.statement
        text = json.dumps(statement, sort_keys=True).encode().ljust(_SAID_BYTES)
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)[None]
        with guard.whole_or_broken(), communicating(f"ranks {[*members]} could not compare calls"):
            everywhere = [Shard(0)] * mesh.ndim
            said = DTensor.from_local(own, mesh, everywhere, run_check=False).full_tensor()
        if device.type != "cpu":
            return torch.where((said == own).all(), 0.0, torch.nan)
        rows = zip(members, said.numpy(), strict=True)
        difference = verdict_on(
            {rank: {"statement": json.loads(row.tobytes()), "error": None} for rank, row in rows},
            complete=True,
        )
        if difference:
            guard.refuse(difference)
        return torch.zeros((), device=device)


class _Gathered(torch.autograd.Function):
    """Gathers all parts of a call at once, so that their gradients come at once too."""

    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *parts: Any) -> tuple[Tensor, ...]:
        ctx.gathering, ctx.parts = gathering, parts
        wrong, guard = gathering.meet(parts[0].device), gathering.call.user.session.guard
        whole = []
        with guard.whole_or_broken(), communicating("the weight could not be gathered"):
            for x in parts:
                part = x.to_local().to(gathering.dtype or x.dtype)
                part = part + wrong if part.is_cuda else part
                whole.append(_spread_like(x, part).full_tensor())
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needed = zip(ctx.parts, grads, ctx.needs_input_grad[1:], strict=True)
        made = iter(_reduced(ctx.gathering, [(x, grad) for x, grad, wanted in needed if wanted]))
        return (None, *(next(made) if wanted else None for wanted in ctx.needs_input_grad[1:]))


@collective_call(lambda gathering, *_: of_calls(gathering.call.calls))
def _reduced(gathering: Gathering, pairs: list[tuple[Any, Tensor]]) -> list[Any]:
    """Of parts and the gradients of their wholes: the gradients of the parts."""
    from torch.distributed.tensor import DTensor, Partial

    call, reduced = gathering.call, []
    for x in [x for x, _ in pairs if x.is_cuda and x.is_leaf and x.grad is not None][:1]:
        # To which FSDP2 may be adding on a stream that nobody waits for before the end.
        torch.cuda.synchronize(x.device)
    wrong, guard = gathering.meet(pairs[0][1].device, backward=True), call.user.session.guard
    with guard.whole_or_broken(), communicating("gradients of the weight could not be reduced"):
        for x, grad in pairs:
            mesh = x.device_mesh
            divisor = wrong + (1 if call.reduce == "sum" else mesh.size())
            summands = [Partial()] * mesh.ndim
            total = DTensor.from_local(grad.to(x.dtype), mesh, summands, run_check=False)
            part = total.redistribute(placements=x.placements).to_local()
            reduced.append(_spread_like(x, part / divisor))
    return reduced


def _spread_like(x: Any, part: Tensor) -> Any:
    from torch.distributed.tensor import DTensor

    how = (x.device_mesh, x.placements)
    return DTensor.from_local(part, *how, run_check=False, shape=x.shape, stride=x.stride())
