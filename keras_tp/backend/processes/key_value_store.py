"""Exchanges small values between the processes of a run.

Every runtime has a key-value store in process 0. Before a collective, all
processes meet through it. If a process is missing, the others do not wait
forever: they stop with an error that names it.
"""

import collections
import contextlib
import time

from keras_tp.backend.processes import messages
from keras_tp.backend.processes import progress
from keras_tp.backend.processes import timeouts

# Seconds of one look into the store: while waiting, after which Python handles
# signals, and for something that may be there.
_PIECE_S = 2
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
                f"Process {self.index} waited at {what}, but process(es) "
                f"{missing} of {self.count} did not arrive within "
                f"{self._patience():g} seconds (KERAS_TP_TIMEOUT). All "
                "processes have to run the same program on the same number of "
                "batches." + self._meanwhile(what)
            )
        return values

    def meet(self, what):
        """Waits until every process calls this. A collective."""
        _, missing = self._collect(None, what)
        if missing:
            raise RuntimeError(
                timeouts.not_called_by_all(
                    *(what, self.index, self.count, self._patience()),
                    f"process(es) {missing}.",
                )
                + self._meanwhile(what)
            )

    def _collect(self, value, what):
        """Returns the values of the others, and the indices of missing ones."""
        name = "keras_tp/" + what.replace(" ", "_").replace("`", "")
        number = self._rounds[what]
        self._rounds[what] += 1
        self._steps += 1
        values, missing = [], []
        with progress.meeting(what):
            self._put(self._step_key(self._steps, self.index), what.encode())
            self._put(f"{name}/{number}/{self.index}", messages.encode(value))
            deadline = time.monotonic() + self._patience()
            for index in range(self.count):
                try:
                    found = self._wait(f"{name}/{number}/{index}", deadline)
                    values.append(messages.decode(found))
                except TimeoutError:
                    missing.append(index)
        if not missing:
            # All processes are here, so all have read the previous values.
            if number:
                self._delete(f"{name}/{number - 1}/{self.index}")
            if self._steps > 1:
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

    def _patience(self):
        return timeouts.patience(self.patience)

    def _wait(self, key, deadline):
        while True:
            left = deadline - time.monotonic()
            try:
                return self._get(key, max(min(left, _PIECE_S), 0.01))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
