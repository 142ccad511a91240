"""Every process reports its state to the others about once a second.

A thread of each process is connected to process 0, which forwards the reports.
So the others can name a process that is stuck, stopped or gone, even while
their runtime only waits. See `progress` for the definition of stuck.
"""

import contextlib
import json
import logging
import selectors
import socket
import threading
import time

from keras_tp.backend.processes import progress
from keras_tp.backend.processes import rendezvous
from keras_tp.backend.processes.progress import State

_KEY = "keras_tp/watch"
# Longest line that a process of the run sends.
_LINE_BYTES = 2**20
_watch = []


def start(host, index, count, put, get, patience, end):
    """Connects this process with the others. A collective.

    Args:
        host: String. Host name or address of process 0.
        index: Int. Index of this process.
        count: Int. Number of processes.
        put: Function of a key and bytes. Writes to the runtime's store.
        get: Function of a key and seconds. Reads from the store, and raises
            an error if the key is not there in time.
        patience: Float. Seconds that processes wait for each other.
        end: Function of an error message and its summary. Ends this process.
    """
    if count < 2 or _watch:
        return
    server = None
    if index == 0:
        server = _Server(rendezvous.server(host, 0), count)
        put(_KEY, str(server.port).encode())
        server.start()
    port = int(get(_KEY, patience))
    try:
        link = socket.create_connection((host, port), timeout=patience)
        rendezvous.introduce(link, index)
        if not rendezvous.read_line(link):
            raise ConnectionError("it closed the connection")
    except OSError as e:
        logging.getLogger(__name__).warning(
            "Process %d cannot connect to process 0 at %s:%d: %s. Errors may "
            "not name a process that is stuck.",
            *(index, host, port, e),
        )
        return
    _watch.append(_Watcher(link, index, count, patience, end, server))
    _watch[0].start()


def cause(seconds):
    """Returns which process caused an error of the communication, or `None`."""
    found = _watch[0].cause_within(seconds) if _watch else None
    return found and found[0]


def places():
    """Returns where the other processes are, or `None` if that is unknown."""
    return _watch[0].places() if _watch else None


def leave(status=progress.LEFT):
    """Tells the others that this process ends, at the end or by an error."""
    while _watch:
        _watch.pop().leave(status)


class _Lines:
    """A connection that sends values as lines of JSON and never blocks."""

    def __init__(self, link):
        self.link = link
        self._received = b""
        self._unsent = b""
        link.setblocking(False)

    def put(self, value):
        """Sends a value, or drops it if an earlier one is not sent yet."""
        if not self._unsent:
            self._unsent = json.dumps(value).encode() + b"\n"
        with contextlib.suppress(BlockingIOError):
            sent = self.link.send(self._unsent)
            self._unsent = self._unsent[sent:]

    def received(self):
        """Returns the received values, or `None` if the connection ended."""
        try:
            received = self.link.recv(_LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received or len(self._received) > _LINE_BYTES:
            return None
        *lines, self._received = (self._received + received).split(b"\n")
        return [json.loads(line) for line in lines]


class _Server(threading.Thread):
    """Forwards the states of all processes. Runs in process 0."""

    def __init__(self, listening, count):
        super().__init__(daemon=True, name="keras_tp_watch_server")
        self.port = listening.getsockname()[1]
        self._listening = listening
        self._count = count
        self._states = {}
        self._heard_at = {}
        self._members = {}

    def run(self):
        with rendezvous.connections() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            due = time.monotonic() + progress.BEAT_S
            # Runs until process 0 leaves.
            while 0 not in self._states or self._states[0].is_here():
                # Silence counts up to this time: later reports may be unread.
                looked = time.monotonic()
                has_news = False
                for key, _ in selector.select(max(due - looked, 0)):
                    has_news |= self._serve(key, selector)
                if has_news or time.monotonic() >= due:
                    self._tell_all(selector, looked)
                    due = time.monotonic() + progress.BEAT_S

    def _serve(self, key, selector):
        """Reads from a connection; returns whether a process has ended."""
        if key.fileobj is self._listening:
            rendezvous.accept(self._listening, selector)
            return False
        if not isinstance(key.data, int):
            index = rendezvous.heard(selector, key, self._count, first=0)
            if index in self._members:
                # A child of that process has its secret and its index.
                key.fileobj.close()
            elif index is not None:
                self._members[index] = _Lines(key.fileobj)
                # The process waits for this reply before it reports.
                self._members[index].put([])
                self._heard_at[index] = time.monotonic()
                selector.register(key.fileobj, selectors.EVENT_READ, index)
            return False
        return self._read(key.data, selector)

    def _read(self, index, selector):
        found = self._members[index].received()
        if found is None:
            link = self._members.pop(index).link
            selector.unregister(link)
            link.close()
            state = self._states.get(index, progress.STARTING)
            if state.is_here():
                state = state._replace(status=progress.GONE)
            self._states[index] = state
            return True
        if not found:
            return False
        self._heard_at[index] = time.monotonic()
        self._states[index] = State(*found[-1])
        return not self._states[index].is_here()

    def _tell_all(self, selector, looked):
        states = [
            [
                index,
                state._replace(silent=max(looked - self._heard_at[index], 0)),
            ]
            for index, state in self._states.items()
        ]
        for index, member in list(self._members.items()):
            try:
                member.put(states)
            except OSError:
                self._read(index, selector)


class _Watcher(threading.Thread):
    """Reports this process's state to process 0, and checks the others'."""

    def __init__(self, link, index, count, patience, end, server):
        super().__init__(daemon=True, name="keras_tp_watch")
        self._lines = _Lines(link)
        self._index = index
        self._count = count
        self._patience = patience
        self._end = end
        self._server = server
        self._states = {}
        # Times of the last news, and of the last check for news.
        self._at = self._looked = time.monotonic()
        self._news = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._status = progress.HERE

    def run(self):
        with contextlib.ExitStack() as stack:
            for held in (self._lines.link, self._wake, self._woken):
                stack.enter_context(held)
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(self._lines.link, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            is_connected = True
            due = 0.0
            while self._status == progress.HERE:
                if time.monotonic() >= due:
                    due = time.monotonic() + progress.BEAT_S
                    self._beat(is_connected)
                looked = time.monotonic()
                wait = max(due - looked, 0)
                ready = [key.fileobj for key, _ in selector.select(wait)]
                self._looked = looked
                if self._lines.link in ready and not self._read():
                    is_connected = False
                    selector.unregister(self._lines.link)
                self._check()
            self._beat(is_connected)

    def leave(self, status):
        """Sends the final status of this process, and ends this thread."""
        self._status = status
        self._wake.send(b"\0")
        self.join()
        if self._server is not None:
            self._server.join()

    def cause_within(self, seconds):
        """Returns the fault, or `None` if it is not found within `seconds`."""
        with self._news:
            return self._news.wait_for(
                lambda: self._fault(progress.failed_state(), True), seconds
            )

    def places(self):
        """Returns where the other processes are, or `None`."""
        others = {i: s for i, s in self._states.items() if i != self._index}
        return progress.places(others, self._patience) if others else None

    def _beat(self, is_connected):
        own = progress.own_state()._replace(status=self._status)
        if is_connected:
            # If the connection has ended, the next read notices it.
            with contextlib.suppress(OSError):
                self._lines.put(own)

    def _read(self):
        """Reads the others' states; returns whether process 0 is connected."""
        found = self._lines.received()
        with self._news:
            if found is None:
                self._lose_the_others()
            elif found:
                self._at = time.monotonic()
                self._states = {
                    index: State(*state) for index, state in found[-1]
                }
            self._news.notify_all()
        return found is not None

    def _lose_the_others(self):
        """Notes that process 0 has ended, and sets the others to unknown."""
        for index, state in self._states.items():
            if index == 0 and state.is_here():
                status = progress.GONE
            elif index == 0:
                status = state.status
            else:
                status = progress.UNKNOWN
            self._states[index] = state._replace(status=status)

    def _fault(self, own, has_failed=False):
        age = max(self._looked - self._at, 0)
        states = {
            index: state._replace(silent=state.silent + age)
            for index, state in self._states.items()
        }
        states[self._index] = own
        return progress.fault(states, self._patience, has_failed)

    def _check(self):
        found = self._fault(progress.own_state())
        if found is not None and self._status == progress.HERE:
            self._end(*found)
