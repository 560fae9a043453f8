"""The connections of a process group over gloo, so that they can be shut down.

A rank that breaks off a call drops its groups, and the others learn it from closed connections. But
processes that it forked, as the workers of a `DataLoader`, hold copies, and a connection is closed
only with its last copy. Shutting it down ends it for all who hold it, here and at the other end,
and what is in flight on it fails at once. gloo has no call for that, so `groups.py` compares the
sockets of the process before and after it makes a group.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class OpenSocket:
    """By its number, which may be used again, and what the system calls it, which is not."""

    descriptor: int
    inode: int

    def copy(self) -> socket.socket | None:
        """None if it is closed."""
        try:
            descriptor = os.dup(self.descriptor)
        except OSError:
            return None
        if os.fstat(descriptor).st_ino != self.inode:
            os.close(descriptor)
            return None
        return socket.socket(fileno=descriptor)

    def shut_down(self) -> None:
        connection = self.copy()
        if connection is not None:
            with connection, suppress(OSError):  # the other end was faster
                connection.shutdown(socket.SHUT_RDWR)


def open_sockets() -> frozenset[OpenSocket]:
    """All of this process; none where the system does not say."""
    sockets = set()
    with suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets.add(OpenSocket(int(name), status.st_ino))
    return frozenset(sockets)


def connections_since(before: frozenset[OpenSocket], wanted: int) -> tuple[OpenSocket, ...]:
    """The connections of a group that was made meanwhile and has `wanted` of them. If another
    thread made connections too: only those that the group accepted, which are surely its own."""
    listening = set()
    ends = {}
    for open_socket in open_sockets() - before:
        copy = open_socket.copy()
        if copy is None:
            continue
        with copy, suppress(OSError):
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(copy.getsockname())
            else:
                copy.getpeername()  # raises unless it is connected
                ends[open_socket] = copy.getsockname()
    if len(listening) == 1 and len(ends) == wanted:
        return (*ends,)
    return tuple(open_socket for open_socket, end in ends.items() if {end} == listening)
