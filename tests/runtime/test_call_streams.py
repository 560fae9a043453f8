"""The order in which kernel calls take turns on two streams, written down by stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh_attention.runtime.compute import _forward
from mesh_attention.runtime.streams import ComputeStreams


class Log(list[str]):
    """Stands for the streams and for the rows that results go to."""

    def turn(self) -> None:
        self.append("turn")

    def follow(self) -> None:
        self.append("follow")

    def take(self, *result: Any) -> None:
        self.append("take")


@pytest.mark.parametrize("follows", [True, False])
def test_only_the_first_call_waits_for_what_was_computed_before_and_every_merge_for_the_last_one(
    follows: bool,
) -> None:
    log: Any = Log()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        log.append("call")
        return torch.zeros(1), torch.zeros(1)

    _forward(log, follows, [], [(call, log), (call, log)])
    each = ["turn", "call", "follow", "take"]
    assert log == (["turn", "follow", *each[1:], *each] if follows else [*each, *each])


def test_with_one_stream_there_is_nothing_to_finish() -> None:
    streams = ComputeStreams(torch.device("cpu"))
    only: Any = object()
    streams._main = streams._stream = only  # as a GPU has it: it would refuse to wait for itself
    streams.turn()
    streams.follow()
    streams.switch()
    streams.pause()
    streams.resume()
    streams.finish()
    assert streams._stream is only
    assert not streams.two
