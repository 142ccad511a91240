import json
import queue
import socket
import threading

import pytest

from keras_tp.backend.processes import heartbeats
from keras_tp.backend.processes import progress
from keras_tp.backend.processes import rendezvous
from keras_tp.backend.processes.progress import State

WAITS_S = 60


@pytest.fixture
def server():
    found = heartbeats._Server(rendezvous.server("127.0.0.1", 0), 3)
    found.start()
    yield found
    assert not found.is_alive()


def joined(server, index):
    """Returns the connection of a process, as `_Lines`."""
    link = socket.create_connection(("127.0.0.1", server.port))
    link.settimeout(WAITS_S)
    rendezvous.introduce(link, index)
    assert rendezvous.read_line(link)
    return link


def tell(link, status=progress.HERE, steps=1, still=0.0):
    lines = heartbeats._Lines(link)
    lines.put(State(steps, "here", progress.ALONE, still, status=status))
    link.settimeout(WAITS_S)


def told(link, wanted):
    """Returns what is told about the others as soon as it is as wanted."""
    while True:
        lines = rendezvous.read_line(link).splitlines()
        assert lines
        states = {i: State(*s) for i, s in json.loads(lines[-1])}
        if wanted(states):
            return states


def test_states_are_passed_on(server):
    links = [joined(server, index) for index in range(3)]
    for index, link in enumerate(links):
        tell(link, steps=index)
    for link in links:
        found = told(link, lambda states: len(states) == 3)
        assert [found[i].steps for i in range(3)] == [0, 1, 2]
    tell(links[1], progress.LEFT)
    links[1].close()
    # A process that only closes its connection has not said why.
    links[2].close()
    found = told(links[0], lambda states: states[2].status != progress.HERE)
    assert found[1].status == progress.LEFT
    assert found[2].status == progress.GONE
    links[0].close()
    server.join(WAITS_S)


def test_a_child_does_not_take_the_place_of_its_process(server):
    links = [joined(server, index) for index in range(2)]
    for link in links:
        tell(link)
    for index in range(2):
        child = socket.create_connection(("127.0.0.1", server.port))
        child.settimeout(WAITS_S)
        rendezvous.introduce(child, index)
        assert not rendezvous.read_line(child)
        child.close()
    tell(links[1], steps=5)
    found = told(links[0], lambda states: 1 in states and states[1].steps == 5)
    assert all(state.status == progress.HERE for state in found.values())
    links[0].close()
    links[1].close()
    server.join(WAITS_S)


def test_strangers_are_dropped(server, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv(rendezvous.SECRET, "another")
        link = socket.create_connection(("127.0.0.1", server.port))
        with link:
            link.settimeout(WAITS_S)
            answer = rendezvous._proof("no challenge", 1)
            rendezvous.read_line(link)
            link.sendall(b'{"index": 1, "proof": "%s"}\n' % answer.encode())
            assert link.recv(1) == b""
    link = joined(server, 0)
    tell(link, progress.LEFT)
    link.close()
    server.join(WAITS_S)


def _tell_all_heard(server, selector, looked):
    _tell_all(server, selector, min(server._heard_at.values()))


_tell_all = heartbeats._Server._tell_all


@pytest.fixture
def watcher(server, monkeypatch):
    """A watcher of process 1, and what it ended with."""
    # Process 0 beats once only here, and does not count as silent for that.
    monkeypatch.setattr(heartbeats._Server, "_tell_all", _tell_all_heard)
    first = joined(server, 0)
    ended = queue.SimpleQueue()
    link = joined(server, 1)
    found = heartbeats._Watcher(
        *(link, 1, 3, 3.0), lambda *error: ended.put(error), None
    )
    found.start()
    yield found, first, ended
    if found.is_alive():
        found.leave(progress.LEFT)
    tell(first, progress.LEFT)
    first.close()
    server.join(WAITS_S)


def test_a_fault_ends_the_process(watcher, monkeypatch):
    monkeypatch.setattr(progress, "GRACE_S", 0.1)
    found, first, ended = watcher
    tell(first, steps=0, still=100.0)
    progress.together("a step")
    text, short = ended.get(timeout=WAITS_S)
    assert text.startswith("Process 0 is stuck in here, while others wait")
    assert "process 1 at a step" in short
    progress.alone("the script")


def test_leaving_is_told_at_once(watcher):
    found, first, ended = watcher
    found.leave(progress.LEFT)
    states = told(
        first,
        lambda states: 1 in states and states[1].status != progress.HERE,
    )
    assert states[1].status == progress.LEFT
    assert not found.is_alive()


def test_news_of_a_cause_are_waited_for(watcher):
    found, first, ended = watcher
    progress.together("a step")
    cause = []
    waiting = threading.Thread(
        target=lambda: cause.append(found.cause_within(WAITS_S))
    )
    waiting.start()
    tell(first, "ValueError: no", steps=0)
    waiting.join(WAITS_S)
    assert "Process 0 failed (ValueError: no)" in cause[0][0]
    progress.alone("the script")


def test_where_the_others_are(watcher):
    found, first, ended = watcher
    assert found.places() is None
    tell(first, steps=0)
    with found._news:
        assert found._news.wait_for(found.places, WAITS_S)
    assert "process 0 is at here" in found.places()
