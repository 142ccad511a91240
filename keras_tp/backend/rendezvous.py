"""Processes meet before a runtime starts, so that a missing one has a name.

The runtimes wait for all processes, and where one does not come some of them
end the others without a word about which. So process 0 listens for the others
at the address where the runtime will do so a moment later.
"""

import contextlib
import json
import select
import socket
import time

_RETRY_S = 0.2


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
        missing = _listen(int(port), count, deadline)
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


def _listen(port, count, deadline):
    """Process 0: returns the list of the missing, and tells all others."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_server(port))
        except OSError as e:
            raise RuntimeError(
                f"Process 0 cannot listen at port {port} for the others: {e}. "
                "Choose a port that nothing else uses."
            ) from e
        came = {}
        missing = set(range(1, count))
        while missing:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([server], [], [], left)[0]:
                break
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(max(deadline - time.monotonic(), _RETRY_S))
            index = _read(connection)
            if isinstance(index, int):
                came[index] = connection
                missing.discard(index)
        for connection in came.values():
            # One that ended meanwhile need not be told.
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(sorted(missing)).encode() + b"\n")
        return sorted(missing)


def _ask(host, port, index, deadline):
    """The others: returns the list of the missing, as process 0 has it."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return [0]
        try:
            with socket.create_connection((host, port), timeout=left) as link:
                link.sendall(json.dumps(index).encode() + b"\n")
                # Process 0 may have begun to wait later than this one.
                link.settimeout(2 * left)
                missing = _read(link)
        except OSError:
            missing = None
        if isinstance(missing, list):
            return missing
        time.sleep(_RETRY_S)


def _server(port):
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _read(connection):
    """Returns the value of one line of JSON; `None` if none came."""
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte:
                return None
            line += byte
    try:
        return json.loads(line)
    except ValueError:
        return None
