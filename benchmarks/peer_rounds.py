"""What one rank does in `against_peers.py`: contestants of each cell, compared and timed in turns.

Each contestant is made once a cell and compared with one device, out and all gradients; one that is
refused or wrong is not timed, and the reason takes its place. Then all take turns, round by round,
so that drift meets them alike: forward alone, and forward with backward. The first rank writes a
line of JSON for the cluster that was profiled, and one for each cell as soon as it is done.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from peer_cell import DTYPES, LIMIT, Cell, Contestant, Surroundings, largest_error, tensors, truth
from peer_contestants import entry_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mesh_attention.errors import MeshAttentionError
from mesh_attention.measure.kernel_rates import Sizes
from mesh_attention.measure.profile import profile_ranks
from mesh_attention.measure.ranks import Ranks

BLOCK_PAIRS = 1 << 29  # of the reference on a GPU
MOST_CHARACTERS = 300  # of a reason


@dataclass
class Timed:
    """A contestant that is exact, its shards, and seconds of the slowest rank in each round; `cpu`:
    seconds of all threads of all ranks, for both passes."""

    contestant: Contestant
    leaves: list[Tensor]
    grad: Tensor
    error: float
    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def call(self, ranks: Ranks, *, backward: bool) -> tuple[float, list[Tensor]]:
        """Seconds of this rank, and out with its gradients."""
        with self.contestant.around(), torch.set_grad_enabled(backward):
            ranks.wait_for_all()
            begun = time.perf_counter()
            out = self.contestant.attend(*self.leaves)
            results = [out.detach()]
            if backward:
                results += torch.autograd.grad(out, self.leaves, self.grad)
            finish(ranks)
            return time.perf_counter() - begun, results

    def time(self, ranks: Ranks) -> None:
        for backward, seconds in ((False, self.forward), (True, self.both)):
            begun = time.process_time()
            seconds.append(ranks.longest(self.call(ranks, backward=backward)[0]))
        self.cpu.append(ranks.size * ranks.average([time.process_time() - begun])[0])

    def to_json(self, ranks: Ranks) -> dict[str, Any]:
        forward, both = (statistics.median(x) * 1e3 for x in (self.forward, self.both))
        known: dict[str, Any] = {}
        if (predicted := self.contestant.predicted) is not None:
            known["predicted_ms"] = predicted * 1e3
        if (received := self.contestant.received) is not None:
            most = map(ranks.longest, received)
            known["received_bytes"] = dict(zip(("forward", "backward"), most, strict=True))
        return known | {
            "forward_ms": forward,
            "both_ms": both,
            "backward_ms": both - forward,
            "rounds": len(self.both),
            "cpu_seconds": statistics.median(self.cpu),
            "error": self.error,
            "setting": self.contestant.setting,
            "forward_all_ms": [round(x * 1e3, 3) for x in self.forward],
            "both_all_ms": [round(x * 1e3, 3) for x in self.both],
        }


def cells(args: Any, dtype: torch.dtype) -> Iterator[Cell]:
    """Causal ones first, small ones first: time may end before cells do."""
    for mask, tokens, heads in product(args.masks, sorted(args.tokens), args.heads):
        q_heads, kv_heads = map(int, heads.split(":"))
        yield Cell(tokens, q_heads, kv_heads, args.dim, mask, dtype)


class CellRun:
    """One cell on all ranks."""

    def __init__(self, cell: Cell, here: Surroundings, args: Any) -> None:
        self._cell, self._here, self._args = cell, here, args
        self._ranks = here.ranks
        self._timed: dict[str, Timed] = {}
        self._result: dict[str, dict[str, Any]] = {}

    def run(self, deadline: float) -> dict[str, Any]:
        self._admit()
        self._rounds(deadline)
        for name, timed in self._timed.items():
            self._result[name] = timed.to_json(self._ranks)
        for timed in self._timed.values():
            timed.contestant.close()
        return {name: self._result[name] for name in self._args.contestants}

    def _admit(self) -> None:
        """Makes all contestants; those that are right are timed."""
        whole = tensors(self._cell.problem, self._ranks.device)
        wanted = reference(self._cell, self._here, whole)
        keys: dict[str, str] = {}
        for name in self._args.contestants:
            result = self._attempt(name, keys, whole, wanted)
            if isinstance(result, Timed):
                self._timed[name] = result
                result.call(self._ranks, backward=False)  # a warm-up; comparing was the other
            else:
                self._result[name] = result
                say_first(self._ranks, f"{name}: {result}")
        del whole, wanted
        if self._ranks.is_cuda:
            torch.cuda.empty_cache()  # ranks share the GPU

    def _attempt(
        self, name: str, keys: dict[str, str], whole: list[Tensor], wanted: list[Tensor]
    ) -> Timed | dict[str, Any]:
        contestant: Contestant | None = None
        timed: Timed | None = None
        reason = ""
        try:
            contestant = entry_of(name).make(self._cell, self._here)
            if same := keys.get(contestant.key()):
                contestant.close()
                return {"same_as": same, "setting": contestant.setting}
            timed = self._compared(contestant, whole, wanted)
        except Exception as error:  # of others too, whatever it is
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_CHARACTERS]
        reason = next(filter(None, self._ranks.everyones(reason)), "")
        if timed is not None and not reason:
            keys |= {timed.contestant.key(): name} if timed.contestant.key() else {}
            return timed
        if contestant is not None:
            contestant.close()
        return {"refused": reason}

    def _compared(self, contestant: Contestant, whole: list[Tensor], wanted: list[Tensor]) -> Timed:
        *leaves, grad = (contestant.shard(x) for x in whole)
        timed = Timed(contestant, [x.requires_grad_() for x in leaves], grad, 0.0)
        results = timed.call(self._ranks, backward=True)[1]
        contestant.check()
        timed.error = largest_error(self._ranks, results, [contestant.shard(x) for x in wanted])
        if not timed.error < LIMIT[self._cell.dtype]:
            raise MeshAttentionError(f"wrong: differs from one device by {timed.error:.1e}")
        return timed

    def _rounds(self, deadline: float) -> None:
        for turn in range(self._args.rounds):
            names = [*self._timed] if turn % 2 == 0 else [*reversed(self._timed)]
            for name in names:
                self._timed[name].time(self._ranks)
            if self._ranks.longest(float(time.monotonic() > deadline)):
                break
            if turn % 5 == 4:
                say_first(self._ranks, f"round {turn + 1} of {self._args.rounds}")


def reference(cell: Cell, here: Surroundings, whole: list[Tensor]) -> list[Tensor]:
    """Out and gradients on one device, in float64; in float32 where tensors are bfloat16. The first
    rank makes them, once for all numbers of ranks."""
    ranks, file = here.ranks, here.folder / f"{cell.name}.pt"
    if ranks.rank == 0 and not file.exists():
        if cell.dtype == torch.bfloat16:
            with sdpa_kernel(SDPBackend.MATH):
                exact = truth(whole, cell.mask, torch.float32, BLOCK_PAIRS)
        else:
            exact = truth(whole, cell.mask)
        torch.save([x.contiguous().cpu() for x in exact], file.with_suffix(".part"))
        del exact
        if ranks.is_cuda:
            torch.cuda.empty_cache()
        file.with_suffix(".part").rename(file)
    while not file.exists():  # who waits for a rank over NCCL keeps the GPU busy
        time.sleep(0.05)
    return [x.to(ranks.device) for x in torch.load(file, mmap=True)]


def finish(ranks: Ranks) -> None:
    """Waits for the GPU asleep: ranks that share a machine need its cores for their transfers."""
    if ranks.is_cuda:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()


def say_first(ranks: Ranks, line: str) -> None:
    if ranks.rank == 0:
        print(line, file=sys.stderr, flush=True)


def run_cells(ranks: Ranks, args: Any) -> None:
    """All cells of one number of ranks, until the seconds are over."""
    begun = time.monotonic()

    def tell(line: dict[str, Any]) -> None:
        if ranks.rank == 0:
            print(json.dumps(line), flush=True)

    dtype = DTYPES[2 if ranks.is_cuda else 4]
    heads = max(int(x.split(":")[0]) for x in args.heads)
    sizes = Sizes.usual(ranks.device, heads=heads, head_dim=args.dim, dtype=dtype, quick=args.quick)
    profile = profile_ranks(ranks, sizes=sizes)
    say_first(ranks, f"profiled {ranks.size} ranks in {time.monotonic() - begun:.0f} s")
    device = profile.cluster.gpu.name
    tell({"ranks": ranks.size, "device": device, "cluster": profile.text})
    here = Surroundings(ranks, profile.cluster, args.folder)
    longest = 0.0
    for cell in cells(args, dtype):
        started = time.monotonic()
        line = {
            "ranks": ranks.size,
            "tokens": cell.tokens,
            "heads": cell.heads,
            "kv_heads": cell.kv_heads,
            "dim": cell.dim,
            "mask": cell.mask_name,
        }
        late = started + longest > begun + args.seconds
        if ranks.longest(float(late)):
            tell(line | {"not_run": f"too little was left of {args.seconds:.0f} s"})
            continue
        say_first(ranks, f"{ranks.size} ranks: {cell.name}")
        contestants = CellRun(cell, here, args).run(begun + args.seconds)
        longest = max(longest, time.monotonic() - started)
        tell(line | {"seconds": time.monotonic() - started, "contestants": contestants})
        say_first(ranks, f"{ranks.size} ranks: {cell.name} took {time.monotonic() - started:.0f} s")
    ranks.wait_for_all()
