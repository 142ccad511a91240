"""Exchanges small values between the processes of a run.

Every runtime has a key-value store in process 0. Before a collective, all
processes meet through it. If a process is missing, the others do not wait
forever: they stop with an error that names it.
"""

import collections
import contextlib
import threading
import time

from keras_tp.backend.processes import messages
from keras_tp.backend.processes import progress
from keras_tp.backend.processes import timeouts

# Within `longer`, seconds between two signs of life of a process, and seconds
# that others look for one.
_BEAT_S = 2
_LOOK_S = 0.1


class Store:
    """Gathers values and synchronizes processes through the runtime's store.

    Args:
        put: Function of a key and bytes.
        get: Function of a key and seconds. It returns the bytes of the key as
            soon as a process has put them, and raises `TimeoutError` if none
            does so in time.
        delete: Function of a key.
        index: Int. Index of this process.
        count: Int. Number of processes.
        patience: Float. Seconds that a process waits for the others.
    """

    def __init__(self, put, get, delete, index, count, patience):
        self._put = put
        self._get = get
        self._delete = delete
        self.index = index
        self.count = count
        self.patience = patience
        self._rounds = collections.Counter()
        # Number of times that this process has met the others.
        self._steps = 0
        self._beats = collections.Counter()

    @contextlib.contextmanager
    def longer(self):
        """Context in which the others wait as long as this process is alive.

        They wait up to `timeouts.LONGEST_S` seconds. A collective.
        """
        self._rounds["longer"] += 1
        self._beats.clear()
        stopped = threading.Event()
        put = []

        def beat():
            while not stopped.wait(_BEAT_S):
                put.append(self._beat_key(self.index, len(put)))
                try:
                    self._put(put[-1], b"")
                except RuntimeError:
                    # The store is gone, so the run has ended.
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            with timeouts.longer():
                yield
        finally:
            stopped.set()
            thread.join()
        for key in put:
            self._delete(key)

    def _beat_key(self, index, number):
        return f"keras_tp/alive/{self._rounds['longer']}/{index}/{number}"

    def _has_beaten(self, index):
        """Whether a process has shown a sign of life since the last call."""
        before = self._beats[index]
        with contextlib.suppress(TimeoutError):
            while True:
                self._get(self._beat_key(index, self._beats[index]), _LOOK_S)
                self._beats[index] += 1
        return self._beats[index] > before

    def gather(self, value, what):
        """Returns the list of the values of all processes. A collective.

        Args:
            value: A small value that `messages.encode` supports.
            what: String. Name of the collective.

        Raises:
            RuntimeError: if a process does not take part in time.
        """
        values, missing = self._collect(value, what)
        if missing:
            raise RuntimeError(
                f"Process {self.index} waits for process(es) {missing} of "
                f"{self.count} at {what}, where they did not come within "
                f"{self.patience:g} seconds (KERAS_TP_TIMEOUT). All processes "
                "have to run the same program on batches of the same number."
                + self._meanwhile(what)
            )
        return values

    def meet(self, what):
        """Waits until every process calls this. A collective.

        Args:
            what: String. Name of the function that all processes have to call.

        Raises:
            RuntimeError: if a process does not call it in time.
        """
        _, missing = self._collect(None, what)
        if missing:
            raise RuntimeError(
                timeouts.not_called_by_all(
                    *(what, self.index, self.count, self.patience),
                    f"process(es) {missing}.",
                )
                + self._meanwhile(what)
            )

    def _collect(self, value, what):
        with progress.meeting(what):
            return self._collect_in_time(value, what)

    def _collect_in_time(self, value, what):
        name = "keras_tp/" + what.replace(" ", "_").replace("`", "")
        number = self._rounds[what]
        self._rounds[what] += 1
        self._steps += 1
        self._put(self._step_key(self._steps, self.index), what.encode())
        self._put(f"{name}/{number}/{self.index}", messages.encode(value))
        began = time.monotonic()
        values, missing = [], []
        for index in range(self.count):
            try:
                found = self._wait(f"{name}/{number}/{index}", index, began)
                values.append(messages.decode(found))
            except TimeoutError:
                missing.append(index)
        if number and not missing:
            # All processes are here, so all have read the previous values.
            self._delete(f"{name}/{number - 1}/{self.index}")
        if self._steps > 1 and not missing:
            self._delete(self._step_key(self._steps - 1, self.index))
        return values, missing

    def _step_key(self, step, index):
        return f"keras_tp/step/{step}/{index}"

    def _meanwhile(self, what):
        """Returns a sentence about processes that wait at other collectives."""
        places = {}
        for index in range(self.count):
            with contextlib.suppress(TimeoutError):
                key = self._step_key(self._steps, index)
                places[index] = self._get(key, _LOOK_S).decode()
        return timeouts.meanwhile(
            {index: place for index, place in places.items() if place != what}
        )

    def _wait(self, key, index, began):
        """Waits for a key, up to `patience` after the last sign of life."""
        last = began + timeouts.patience(self.patience)
        end = began + self.patience
        while True:
            left = end - time.monotonic()
            try:
                return self._get(key, max(min(left, _BEAT_S), 0.01))
            except TimeoutError:
                if last > end and self._has_beaten(index):
                    end = min(last, time.monotonic() + self.patience)
                if time.monotonic() >= end:
                    raise
