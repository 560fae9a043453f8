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
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

_LISTEN_SECONDS = 1.0
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


def shut_down(connections: Iterable[OpenSocket]) -> None:
    """At once for those who wait at the other end. We take what they send for a while longer: a
    send of gloo's that fails as it begins is waited for in vain."""
    copies = [copy for copy in (connection.copy() for connection in connections) if copy]

    def end(how: int) -> None:
        for copy in copies:
            with suppress(OSError):  # the other end was faster
                copy.shutdown(how)

    def end_later() -> None:
        sleep(_LISTEN_SECONDS)
        end(socket.SHUT_RDWR)
        for copy in copies:
            copy.close()

    end(socket.SHUT_WR)
    if copies:
        threading.Thread(target=end_later, name="mesh_attention shut down", daemon=True).start()


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
