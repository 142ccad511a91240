"""Connects all processes before the runtime starts, to name missing ones.

The runtimes wait for all processes. If one is missing, some runtimes end the
others without naming it. So process 0 first listens for the others at the
address where the runtime listens later.

Process 0 sends a random challenge to each connection. A process answers with
its index and a proof that it knows the secret of the run (RFC 2104, HMAC with
SHA-256). The launcher creates the secret; on several hosts the user sets it in
KERAS_TP_SECRET. A connection without a valid answer is closed, while process 0
continues to wait for the others.
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
import warnings

# The environment variable with the secret of a run. Unset is the same as empty.
SECRET = "KERAS_TP_SECRET"
_RETRY_S = 0.2
# Longest line that can be an answer.
_LINE_BYTES = 4096
# Number of connections that may be without an answer at a time.
_GUESTS = 64


def meet(address, count, index, seconds):
    """Waits until all processes of a run have connected. A collective.

    Args:
        address: String. `"host:port"` of process 0. The port is free again
            afterwards.
        count: Int. Number of processes.
        index: Int. Index of this process.
        seconds: Float. Longest time to wait.

    Raises:
        RuntimeError: in every process that connected, if others did not do so
            in time, with the indices of the others.
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
            f"Process(es) {missing} of {count} did not start within "
            f"{seconds:g} seconds (KERAS_TP_TIMEOUT). This is process {index}. "
            f"Process 0 listens at {address}. Start every process with this "
            "address, the same number of processes, and its own index."
        )


def _listen(host, port, count, deadline):
    """Runs in process 0: returns the missing indices and sends them to all."""
    with contextlib.ExitStack() as stack:
        try:
            listening = stack.enter_context(server(host, port))
        except OSError as e:
            raise RuntimeError(
                f"Process 0 cannot listen at {host}:{port} for the others: "
                f"{e}. Choose an address of this host, and a port that nothing "
                "else uses."
            ) from e
        if not os.environ.get(SECRET) and not _is_local(host):
            warnings.warn(
                f"{SECRET} is not set, so anyone who can connect to "
                f"{host}:{port} can join this run as one of its processes. Set "
                "it to the same random text on every host, for example to the "
                "output of `openssl rand -hex 16`.",
                stacklevel=2,
            )
        selector = stack.enter_context(connections())
        selector.register(listening, selectors.EVENT_READ)
        came = {}
        while len(came) < count - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(left):
                if key.fileobj is listening:
                    accept(listening, selector)
                    continue
                index = heard(selector, key, count)
                if index is None:
                    continue
                stack.enter_context(key.fileobj)
                came.setdefault(index, key.fileobj)
        missing = sorted(set(range(1, count)) - set(came))
        for connection in came.values():
            # A process that has ended meanwhile does not need the list.
            with contextlib.suppress(OSError):
                connection.settimeout(_RETRY_S)
                connection.sendall(json.dumps(missing).encode() + b"\n")
        return missing


class _Guest:
    """A connection that has not proven its index: challenge and answer."""

    def __init__(self):
        self.challenge = secrets.token_hex(16)
        self.answer = b""


@contextlib.contextmanager
def connections():
    """Yields a selector. At the end, its connections are closed."""
    with selectors.DefaultSelector() as selector:
        try:
            yield selector
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()


def accept(listening, selector):
    """Accepts a connection, registers it, and sends it a challenge.

    A process answers at once. So where too many have not answered, the one that
    has had the longest time to do so is closed.
    """
    try:
        connection = listening.accept()[0]
    except OSError:
        # It was closed meanwhile.
        return
    guests = [
        key.fileobj
        for key in selector.get_map().values()
        if isinstance(key.data, _Guest)
    ]
    # They are in the order in which they were registered.
    for guest in guests[: max(len(guests) - _GUESTS + 1, 0)]:
        selector.unregister(guest)
        guest.close()
    connection.setblocking(False)
    guest = _Guest()
    try:
        connection.sendall(guest.challenge.encode() + b"\n")
    except OSError:
        connection.close()
        return
    selector.register(connection, selectors.EVENT_READ, guest)


def heard(selector, key, count, first=1):
    """Reads an answer to a challenge, and closes the connection if it is wrong.

    Returns:
        Int. The proven index, at least `first`; `None` if there is none yet.
    """
    guest, connection = key.data, key.fileobj
    if connection.fileno() < 0:
        # `accept` has closed it meanwhile.
        return None
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
                    # JSON may hold characters that have no bytes.
                    proof.encode(errors="replace"),
                    _proof(guest.challenge, index).encode(),
                )
            ):
                selector.unregister(connection)
                return index
    selector.unregister(connection)
    connection.close()
    return None


def _proof(challenge, index):
    """Returns the answer to a challenge, which requires the secret."""
    secret = os.environ.get(SECRET, "").encode()
    text = f"{challenge} {index}".encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def _ask(host, port, index, deadline):
    """Runs in the other processes: returns the missing indices of process 0."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return [0]
        missing = None
        with contextlib.suppress(OSError):
            with socket.create_connection((host, port), timeout=left) as link:
                introduce(link, index)
                # Process 0 may have started to wait later than this one.
                link.settimeout(2 * left)
                missing = _parsed(read_line(link))
        if isinstance(missing, list):
            return missing
        time.sleep(_RETRY_S)


def introduce(link, index):
    """Answers the challenge of process 0."""
    challenge = read_line(link).strip().decode(errors="replace")
    answer = {"index": index, "proof": _proof(challenge, index)}
    link.sendall(json.dumps(answer).encode() + b"\n")


def server(host, port):
    """Returns a socket that listens at the address of process 0 only.

    It listens at all addresses of this host in two cases: the address is not
    the host's own (address translation), or the host's name resolves to a
    loopback address on the host itself.
    """
    family, address = _resolved(host, port)
    if _is_local(host) or not _is_loopback(address):
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


def _resolved(host, port=0):
    """Returns the address family of a host, and its first address."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, (address, *_) = found[0]
    return family, address


def _is_loopback(address):
    return ipaddress.ip_address(address).is_loopback


def _is_local(host):
    """Returns whether the name of a host means this host, on every host."""
    address = _resolved(host)[1]
    return _is_loopback(address) and host in ("localhost", address)


def bound_address(host, port):
    """Returns the `"address:port"` that `server` listens at."""
    with server(host, port) as found:
        address = found.getsockname()[0]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def read_line(link):
    """Returns the next line, or its first part if the connection ends."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        received = link.recv(_LINE_BYTES - len(line))
        if not received:
            break
        line += received
    return line


def _parsed(line):
    """Returns the value of a line of JSON, or `None` if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
