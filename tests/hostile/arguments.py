"""Strange values for every argument that is public: refused by name, or used as they say.

In this process alone, which is a group of one rank; `arguments_on_ranks.py` has two.
"""

from __future__ import annotations

import warnings
from collections import Counter
from random import Random

import torch.distributed as dist
from any_arguments import check_batch, check_plan
from torch._C._distributed_c10d import HashStore

from hostile.campaign import Hang, Verdict, within
from hostile.scene import CALLS, Scene, arguments_of, outcome_of

__all__ = ["Arguments", "random_strange", "shown_value"]

LIMIT = 20.0  # seconds of one case
OFTEN = {"ContextParallel": 5, "attention": 3, "mesh_attention": 4, "shard_batch": 3}


def random_strange(draw: Random) -> tuple[str, str]:
    """A call and one of its arguments."""
    weights = [OFTEN.get(name, 1) for name in CALLS]
    call = draw.choices([*CALLS], weights)[0]
    return call, draw.choice(arguments_of(call))


class Arguments:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._begun = not dist.is_initialized()
        if self._begun:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def case(self, number: int) -> Verdict:
        draw = Random(f"arguments {self._seed} {number}")
        if draw.randrange(5) == 0:
            return self._plan(draw)
        strange = random_strange(draw)
        scene = Scene(strange, draw, None)
        words = f"{strange[0]}({strange[1]}={shown_value(scene.value)})"
        try:
            with within(LIMIT), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome, wrong = outcome_of(scene)
        except Hang as error:
            outcome, wrong = "hang", str(error)
        counts = Counter({outcome: 1, f"of {strange[0]}": 1})
        return Verdict(counts, (f"{words}: {wrong}",) if wrong else ())

    def _plan(self, draw: Random) -> Verdict:
        check = draw.choice((check_plan, check_batch))
        counts = Counter({"of make_plan" if check is check_plan else "of Packer": 1})
        try:
            with within(LIMIT):
                check(draw)
        except (Exception, Hang) as error:
            words = f"{check.__name__}: {type(error).__name__}: {error}"
            return Verdict(counts + Counter({"foreign": 1}), (words,))
        return Verdict(counts)

    def close(self) -> None:
        if self._begun:
            dist.destroy_process_group()


def shown_value(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:77]}..."
