"""Which sockets are those of a process group: never one that somebody else has opened."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mesh_attention.runtime.transport.make_group import (
    connections_since,
    open_sockets,
    shut_down,
)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(opened: ExitStack) -> socket.socket:
    made = opened.enter_context(socket.socket())
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made


def connect(opened: ExitStack, to: socket.socket) -> tuple[socket.socket, socket.socket]:
    """(the end that connects, the end that is accepted)"""
    connection = opened.enter_context(socket.create_connection(to.getsockname()))
    return connection, opened.enter_context(to.accept()[0])


def test_all_new_connections_are_of_the_group_where_it_must_have_as_many(opened: ExitStack) -> None:
    elsewhere = listener(opened)
    before = open_sockets()
    own = listener(opened)
    here, there = connect(opened, own)
    connections = connections_since(before, 2)
    assert {result.descriptor for result in connections} == {here.fileno(), there.fileno()}
    # Shut down at both ends, although nobody has closed a copy; what is no connection is left.
    copy = opened.enter_context(there.dup())
    shut_down(end for end in connections if end.descriptor == there.fileno())
    assert here.recv(1) == b""
    here.send(b"x")  # is still taken, or a send of gloo's that begins now would wait in vain
    assert copy.recv(1) == b"x"
    assert there.recv(1) == b""  # a second later
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    connect(opened, elsewhere)
    before = open_sockets()
    assert connections_since(before, 1) == ()


def test_what_another_thread_opens_meanwhile_is_left_alone(opened: ExitStack) -> None:
    elsewhere = listener(opened)
    before = open_sockets()
    own = listener(opened)
    _, accepted = connect(opened, own)
    connect(opened, elsewhere)
    connections = connections_since(before, 2)  # of four
    assert [result.descriptor for result in connections] == [accepted.fileno()]
    listener(opened)
    assert connections_since(before, 2) == ()  # whose is which?


def test_a_number_that_is_used_again_is_another_socket(opened: ExitStack) -> None:
    before = open_sockets()
    own = listener(opened)
    here, _ = connect(opened, own)
    connections = {
        connection.descriptor: connection for connection in connections_since(before, 2)
    }[here.fileno()]
    descriptor = here.detach()
    socket.close(descriptor)
    others = [opened.enter_context(each) for each in socket.socketpair()]
    assert descriptor in [other.fileno() for other in others]
    shut_down([connections])
    others[0].send(b"x")
    assert others[1].recv(1) == b"x"
