"""Processes meet before a runtime starts, so that a missing one has a name.

The runtimes wait for all processes, and where one does not come some of them
end the others without a word about which. So process 0 listens for the others
at the address where the runtime will do so a moment later.

Whoever connects is sent a random text, and answers with its index and a proof
that it knows the secret of the run (RFC 2104, HMAC with SHA-256). The launcher
makes one; on several hosts it is given by KERAS_TP_SECRET. Whoever gives no
such answer is dropped, and the others are waited for meanwhile.
"""

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time

# The environment variable with the secret of a run; none is an empty one.
SECRET = "KERAS_TP_SECRET"
_RETRY_S = 0.2
# Longer lines are no answers.
_LINE_BYTES = 4096
# More connections than this beside the processes are strangers.
_STRANGERS = 64


def meet(address, count, index, seconds):
    """Waits until all processes of a run have come.

    Args:
        address: String, `"host:port"` of process 0. The port is free again
            afterwards.
        count: Int, number of processes.
        index: Int, index of this process.
        seconds: Float, how long to wait.

    Raises:
        RuntimeError: in every process that did come, if another did not in
            this time, with the index of it.
    """
    if count < 2:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            "The address of process 0 has to be `host:port`. Received: "
            f"{address!r}"
        )
    deadline = time.monotonic() + seconds
    if index == 0:
        missing = _listen(host.strip("[]"), int(port), count, deadline)
    else:
        missing = _ask(host.strip("[]"), int(port), index, deadline)
    if missing:
        raise RuntimeError(
            f"Of {count} processes, those with index {missing} did not start "
            f"within {seconds:g} seconds (KERAS_TP_TIMEOUT); this is process "
            f"{index}. Process 0 listens at {address}: start all of them, "
            "with this address, the same number of processes, and an index "
            "for each."
        )


def _listen(host, port, count, deadline):
    """Process 0: returns the list of the missing, and tells all others."""
    with contextlib.ExitStack() as stack:
        try:
            listening = stack.enter_context(server(host, port))
        except OSError as e:
            raise RuntimeError(
                f"Process 0 cannot listen at {host}:{port} for the others: "
                f"{e}. Choose an address of this host, and a port that nothing "
                "else uses."
            ) from e
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(listening, selectors.EVENT_READ)
        came = {}
        while len(came) < count - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(left):
                if key.fileobj is listening:
                    accept(listening, selector, stack, count)
                    continue
                index = heard(selector, key, count)
                if index is not None and index not in came:
                    came[index] = key.fileobj
        missing = sorted(set(range(1, count)) - set(came))
        for connection in came.values():
            # One that ended meanwhile need not be told.
            with contextlib.suppress(OSError):
                connection.settimeout(_RETRY_S)
                connection.sendall(json.dumps(missing).encode() + b"\n")
        return missing


class _Guest:
    """Whoever has connected: what it was sent, and what it has answered."""

    def __init__(self):
        self.challenge = secrets.token_hex(16)
        self.answer = b""


def accept(listening, selector, stack, count):
    """Takes a connection and sends it a challenge.

    Args:
        listening: Socket that listens.
        selector: Selector, to which the connection is added.
        stack: `contextlib.ExitStack` that closes the connection.
        count: Int, number of processes.
    """
    connection = listening.accept()[0]
    if len(selector.get_map()) > count + _STRANGERS:
        connection.close()
        return
    stack.enter_context(connection)
    connection.setblocking(False)
    guest = _Guest()
    with contextlib.suppress(OSError):
        connection.sendall(guest.challenge.encode() + b"\n")
        selector.register(connection, selectors.EVENT_READ, guest)


def heard(selector, key, count, first=1):
    """Reads an answer to a challenge; drops a connection without the proof.

    Args:
        selector: Selector that the connection was added to.
        key: `SelectorKey` of the connection.
        count: Int, number of processes.
        first: Int, the lowest index that may come. Defaults to 1.

    Returns:
        Int, the index that was proven; `None` as long as there is none.
    """
    guest, connection = key.data, key.fileobj
    try:
        received = connection.recv(_LINE_BYTES)
    except OSError:
        received = b""
    guest.answer += received
    if received and len(guest.answer) <= _LINE_BYTES:
        if not guest.answer.endswith(b"\n"):
            return None
        answer = _parsed(guest.answer)
        if isinstance(answer, dict):
            index, proof = answer.get("index"), answer.get("proof")
            if (
                type(index) is int
                and first <= index < count
                and isinstance(proof, str)
                and hmac.compare_digest(
                    proof.encode(), _proof(guest.challenge, index).encode()
                )
            ):
                selector.unregister(connection)
                return index
    selector.unregister(connection)
    connection.close()
    return None


def _proof(challenge, index):
    """Returns what only who knows the secret can make of a challenge."""
    secret = os.environ.get(SECRET, "").encode()
    text = f"{challenge} {index}".encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def _ask(host, port, index, deadline):
    """The others: returns the list of the missing, as process 0 has it."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return [0]
        missing = None
        with contextlib.suppress(OSError):
            with socket.create_connection((host, port), timeout=left) as link:
                introduce(link, index)
                # Process 0 may have begun to wait later than this one.
                link.settimeout(2 * left)
                missing = _parsed(read_line(link))
        if isinstance(missing, list):
            return missing
        time.sleep(_RETRY_S)


def introduce(link, index):
    """Answers the challenge of process 0.

    Args:
        link: Socket that is connected to it.
        index: Int, index of this process.
    """
    challenge = read_line(link).strip().decode(errors="replace")
    answer = {"index": index, "proof": _proof(challenge, index)}
    link.sendall(json.dumps(answer).encode() + b"\n")


def server(host, port):
    """Listens at the address of process 0, and at no other of this host.

    At all of them only where that is not this host's own: behind a translated
    address, or where this host knows its own name as a loopback.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, (address, *_) = found[0]
    is_loopback = ipaddress.ip_address(address).is_loopback
    if not is_loopback or host in ("localhost", address):
        try:
            return socket.create_server((address, port), family=family)
        except OSError as e:
            if e.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def read_line(link):
    """Returns a line that is sent, or what there is of it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        received = link.recv(_LINE_BYTES - len(line))
        if not received:
            break
        line += received
    return line


def _parsed(line):
    """Returns the value of a line of JSON; `None` if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
