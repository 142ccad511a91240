import concurrent.futures
import contextlib
import json
import socket
import time

import pytest

from keras_tp.backend.processes import rendezvous


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def connected(address):
    """Connects to process 0, as soon as that listens."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=20)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.01)


def answer(link, value):
    """Answers the challenge of process 0 with a line."""
    rendezvous.read_line(link)
    # It may have hung up before all of a long line was sent.
    with contextlib.suppress(OSError):
        link.sendall(value)


def is_dropped(link):
    try:
        return link.recv(1) == b""
    except OSError:
        return True


STRANGERS = {
    "half a line": b'{"index": 1',
    "brackets": b"[" * 100_000 + b"\n",
    "no end of line": b"x" * 3_000_000,
    "no proof": b'{"index": 1}\n',
    "a wrong proof": b'{"index": 1, "proof": "0000"}\n',
    "a proof that is no text": b'{"index": 1, "proof": 3}\n',
    "a proof without bytes": b'{"index": 1, "proof": "\\ud800"}\n',
    "true": b'{"index": true, "proof": ""}\n',
    "an index that is none": b'{"index": 9, "proof": ""}\n',
    "a number": b"1\n",
    "no text": b"\xff\xfe\n",
}


def test_processes_meet(address, monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, "of this run")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        met = [
            pool.submit(rendezvous.meet, address, 3, index, 20)
            for index in (2, 0, 1)
        ]
        assert [future.result() for future in met] == [None] * 3


@pytest.mark.parametrize("secret", ["", "of this run"])
def test_strangers_are_dropped_and_the_others_meet(
    secret, address, monkeypatch
):
    monkeypatch.setenv(rendezvous.SECRET, secret)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))
        first = pool.submit(rendezvous.meet, address, 2, 0, 60)
        # One says nothing at all, and stays.
        stack.enter_context(connected(address))
        links = {}
        for name, value in STRANGERS.items():
            links[name] = stack.enter_context(connected(address))
            answer(links[name], value)
        for name, link in links.items():
            if name != "half a line":
                assert is_dropped(link), name
        assert not first.done()
        rendezvous.meet(address, 2, 1, 60)
        assert first.result() is None


def test_any_number_of_silent_strangers_is_not_waited_for(address, monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, "of this run")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))
        first = pool.submit(rendezvous.meet, address, 2, 0, 60)
        for _ in range(3 * rendezvous._GUESTS):
            link = stack.enter_context(connected(address))
            # Process 0 has accepted it.
            rendezvous.read_line(link)
        rendezvous.meet(address, 2, 1, 60)
        assert first.result() is None


def test_a_run_without_a_secret_on_several_hosts_warns(address, monkeypatch):
    monkeypatch.delenv(rendezvous.SECRET, raising=False)
    port = address.rpartition(":")[2]
    with pytest.raises(RuntimeError, match="did not start"):
        with pytest.warns(UserWarning, match="KERAS_TP_SECRET is not set"):
            rendezvous.meet(f"192.0.2.1:{port}", 2, 0, 0.1)


@pytest.mark.filterwarnings("error")
def test_a_run_on_one_host_does_not_warn(address, monkeypatch):
    monkeypatch.delenv(rendezvous.SECRET, raising=False)
    with pytest.raises(RuntimeError, match="did not start"):
        rendezvous.meet(address, 2, 0, 0.1)


def test_another_secret_is_no_process_of_the_run(address, monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, "of this run")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(rendezvous.meet, address, 2, 0, 5)
        with connected(address) as link:
            challenge = rendezvous.read_line(link).strip().decode()
            monkeypatch.setenv(rendezvous.SECRET, "guessed")
            proof = rendezvous._proof(challenge, 1)
            monkeypatch.setenv(rendezvous.SECRET, "of this run")
            value = {"index": 1, "proof": proof}
            link.sendall(json.dumps(value).encode() + b"\n")
            assert is_dropped(link)
        with pytest.raises(RuntimeError, match=r"\[1\] of 2 did not start"):
            first.result()


def test_only_the_given_address_is_listened_at(address):
    port = int(address.rpartition(":")[2])
    with rendezvous.server("127.0.0.1", port) as server:
        assert server.getsockname() == ("127.0.0.1", port)
    bound = rendezvous.bound_address("127.0.0.1", port)
    assert bound == f"127.0.0.1:{port}"


def test_an_address_of_another_host_is_listened_for_at_all(address):
    # Reserved for documents (RFC 5737): no host has it.
    port = int(address.rpartition(":")[2])
    with rendezvous.server("192.0.2.1", port):
        socket.create_connection(("127.0.0.1", port), timeout=20).close()
