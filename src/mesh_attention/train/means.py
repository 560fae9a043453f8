"""`Means`: the mean over the tokens of all ranks, the same number on each of them.

If every rank took the mean over its own tokens, and the framework averaged these means, the result
would be another number whenever ranks have different numbers of tokens. So tokens are counted over
all ranks, and each rank divides its sum by that count. All losses of `ContextParallel` end here.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree

from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.request.tensor_checks import fault_of_label
from mesh_attention.runtime.agreement.identity import OF_FORWARD_CALL, BatchIdentity, Statement
from mesh_attention.runtime.session.session import User, process_group
from mesh_attention.runtime.transport.distributed import communicating

Reduce = Literal["ddp", "fsdp", "sum"]
_WAY_OUT = "call backward on its loss, which may be scaled and added, and print its value"


def refuse_reduce(reduce: object) -> None:
    if reduce not in get_args(Reduce):
        raise MeshAttentionError(f"reduce={reduce!r}: must be one of {', '.join(get_args(Reduce))}")


@dataclass(frozen=True, eq=False)
class TokenMean:
    """
    loss         to call `backward` on: this rank's share, scaled by how gradients are reduced
    value        to print: the mean over all targets of all ranks, the same on each, without a graph
    num_targets  the number of these targets
    """

    loss: Tensor
    value: Tensor
    num_targets: Tensor

    if not TYPE_CHECKING:  # type checkers refuse these themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"a TokenMean has no {name}: {_WAY_OUT}")

        def _refuse(self, *_: object) -> NoReturn:
            raise MeshAttentionError(f"a TokenMean is no number: {_WAY_OUT}")

        __float__ = __mul__ = __rmul__ = __truediv__ = _refuse
        __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuse


# So that FSDP2 and DDP find the loss in what a module returns.
_pytree.register_dataclass(TokenMean)


@dataclass(frozen=True)
class LossCall:
    """The fields that ranks compare of a call of a loss, or of `log_probs`.

    name     of the method of `ContextParallel` that was called
    reduce   how the caller's framework reduces gradients; None only in `log_probs`
    batch    that `shard_batch` noted on the targets: ranks compare that they have the same
    """

    name: str
    calls: ObjectCalls
    reduce: Reduce | None
    label: str | int | None
    batch: BatchIdentity | None

    @property
    def user(self) -> User:
        return self.calls.user

    def begin(
        self, statement: Statement, device: torch.device, *, name: str = "", of: int = 0
    ) -> None:
        """Tells the other ranks of the group about this pass, and that it begins; they compare it
        with theirs. A backward pass has a `name` of its own, and `of`: the place of its forward
        call."""
        session = self.user.session
        statement = {self.name: self.reduce, "device": device.type} | statement
        options = self.calls.options
        kind = session.calls.agree_on(statement, options, ahead=True)
        batch = OF_FORWARD_CALL if of else self.batch
        self.user.begin(kind, name or self.name, options, device, self.label, of, batch=batch)


@dataclass(frozen=True)
class Means(LossCall):
    """A call that takes a mean; `data_parallel` and `num_targets` as in `cross_entropy`."""

    data_parallel: dist.ProcessGroup | DeviceMesh | None
    num_targets: int | Tensor | None

    def refuse_wrong(self) -> None:
        raise_fault(fault_of_label(self.label))
        self.user.refuse_if_closed()
        refuse_reduce(self.reduce)
        number = self.num_targets
        if isinstance(number, Tensor):
            fits = number.numel() == 1 and number.dtype != torch.bool
        else:
            whole = isinstance(number, Integral) and not isinstance(number, bool)
            fits = number is None or (whole and 0 <= number < 2**63)
        if not fits:
            raise MeshAttentionError(
                f"num_targets={number!r}: give how many targets all ranks have in all batches "
                "whose gradients are accumulated, one number, or leave it out"
            )

    def add_up(self, statement: Statement, sums: Tensor, *, within: bool = True) -> None:
        """Adds up `sums` in place over the context-parallel group: a call that ranks make together.
        Without `within` they compare the call, and add up nothing."""
        session = self.user.session
        self.begin(statement, sums.device)
        with session.guard.whole_or_broken():
            if within and len(session.groups.ranks) > 1:
                _add_up(sums, session.groups.everybody())
            session.guard.settle((sums,))

    @property
    def ranks(self) -> LossRanks:
        return LossRanks.of(self.user.session.groups.ranks, self.data_parallel)

    def mean(
        self,
        own: Tensor,
        counted: Tensor,
        dtype: torch.dtype,
        alike: dict[str, object],
        statement: Statement,
    ) -> TokenMean:
        """The mean from this rank's sum, in float64 and with its graph, and from its count.

        dtype      of the loss
        alike      what all ranks must say alike, data-parallel ones too
        statement  what ranks of the group compare besides
        """
        session = self.user.session
        ranks = self.ranks
        number = self.num_targets
        if isinstance(number, Tensor):
            number = number.detach().reshape(())
        check = _ReplicaCheck(self.name, number, {"reduce": self.reduce} | alike, own.device)
        sums = torch.cat([torch.stack([own.detach(), counted]), check.sums])
        replicas = ranks.number // len(session.groups.ranks)
        statement = statement | alike | {"data parallel ranks": replicas}
        self.add_up(statement, sums, within=ranks.within)
        if ranks.group is not None:
            _add_up(sums, ranks.group, "of data-parallel ranks, one of which may have failed, ")
        total, count = sums[:2].unbind()
        try:
            wrong = check.is_wrong(sums[2:], count, ranks.number)
        except MeshAttentionError as error:  # of the sums, so on all ranks
            raise session.guard.known(error) from None
        # Where nothing is counted sums are 0, and so is the loss, by whichever number.
        divisor = (count if number is None else torch.zeros_like(count) + number) + (count == 0)
        divisor = divisor.masked_fill(wrong, torch.nan)
        scale = 1 if self.reduce == "sum" else ranks.number
        return TokenMean((own * scale / divisor).to(dtype), total / divisor, count.long())


@dataclass(frozen=True)
class LossRanks:
    """The ranks over which a mean is taken.

    known    ranks of the context-parallel group and of `data_parallel`
    number   of all ranks that have a part of the batch
    group    of `data_parallel`, over which sums are added up; None without it
    within   whether sums are added up in the context-parallel group first: not if `group` has all
             its ranks
    """

    known: frozenset[int]
    number: int
    group: dist.ProcessGroup | None
    within: bool

    @staticmethod
    def of(own: tuple[int, ...], data_parallel: dist.ProcessGroup | DeviceMesh | None) -> LossRanks:
        """`own`: the ranks of the context-parallel group."""
        if data_parallel is None:
            return LossRanks(frozenset(own), len(own), None, True)
        group = process_group(data_parallel)
        others = dist.get_process_group_ranks(group)
        if {*own} == {*others} and len(own) < dist.get_world_size():
            raise MeshAttentionError(
                f"data_parallel has the ranks {others} of the context-parallel group itself: give "
                "the group of the ranks that hold the same tokens of other batches, as in "
                "mesh['dp'], or leave it out"
            )
        known = frozenset({*own, *others})
        if {*own} <= {*others}:
            return LossRanks(known, len(others), group, False)
        if {*own} & {*others} == {dist.get_rank()}:
            return LossRanks(known, len(own) * len(others), group, True)
        raise MeshAttentionError(
            f"data_parallel has the ranks {others}, and the context-parallel group {list(own)}: "
            "give the group of the ranks that hold the same tokens of other batches, as in "
            "mesh['dp'], or one of all ranks"
        )


class _ReplicaCheck:
    """Checks that all ranks, those of other replicas too, say `alike` and `num_targets` alike.

    Both travel with the sums of the losses as numbers below 4,093 and their squares, which are
    exact when added up. The mean of the squares is the square of the mean only if all are equal."""

    def __init__(
        self,
        name: str,
        num_targets: int | Tensor | None,
        alike: dict[str, object],
        device: torch.device,
    ) -> None:
        *others, last = alike
        self._words = f"replicas call {name} with another {', '.join(others)} or {last}"
        self._num_targets = num_targets
        number = int.from_bytes(blake2b(repr(alike).encode(), digest_size=3).digest(), "big")
        # Numbers are filled in: a copy of them to a device would make the host wait.
        if isinstance(num_targets, Tensor):
            count = num_targets.to(device).round().long()
        else:
            count = torch.full((), -1 if num_targets is None else int(num_targets), device=device)
        both = torch.stack([count, torch.full((), number, device=device)])
        values = torch.stack([both % modulus for modulus in _MODULI], 1).flatten().double()
        self.sums = torch.cat([values, values**2])

    def is_wrong(self, sums: Tensor, count: Tensor, num_ranks: int) -> Tensor:
        """From the sums over all ranks: whether results must be NaN. On the CPU, where this waits
        for nothing, it is an error instead, on all ranks. `count`: targets of this batch."""
        total, squares = sums.chunk(2)
        numbers, settings = (total**2 != num_ranks * squares).view(2, -1).any(1)
        few = count > (count if self._num_targets is None else self._num_targets)
        if sums.device.type == "cpu":
            if bool(settings):
                raise MeshAttentionError(self._words)
            if bool(numbers):
                raise MeshAttentionError(
                    f"num_targets is {_number(self._num_targets)} here and another number on other "
                    "ranks: it is the number of all ranks' targets, data-parallel ranks included, "
                    "in all batches whose gradients are accumulated"
                )
            if bool(few):
                raise MeshAttentionError(
                    f"num_targets is {_number(self._num_targets)}, fewer than the {int(count)} "
                    "targets of this batch"
                )
        wrong: Tensor = numbers | settings | few
        return wrong


_MODULI = (4093, 4091)


def _number(value: int | Tensor | None) -> float | None:
    return value.item() if isinstance(value, Tensor) else value


def _add_up(x: Tensor, group: dist.ProcessGroup, whose: str = "") -> None:
    with communicating(f"the sums {whose}could not be added up"):
        dist.all_reduce(x, group=group)
