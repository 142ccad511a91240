"""Small values that the processes of a run hand to each other.

Every runtime has a store of keys that process 0 holds. What all processes have
to enter, they meet in first: where one does not come, the others stop with an
error that names it, and nobody waits forever.
"""

import collections
import pickle
import time


class Store:
    """What processes tell each other by way of their runtime's store.

    Args:
        put: Function of a key and bytes.
        get: Function of a key and seconds, which returns the bytes of the key
            as soon as some process has put them, and raises `TimeoutError`
            if none did in this time.
        delete: Function of a key.
        index: Int, index of this process.
        count: Int, number of processes.
        patience: Float, seconds that a process waits for the others.
    """

    def __init__(self, put, get, delete, index, count, patience):
        self._put = put
        self._get = get
        self._delete = delete
        self.index = index
        self.count = count
        self.patience = patience
        self._rounds = collections.Counter()

    def gather(self, value, what):
        """Returns the list of the value of every process. A collective.

        Args:
            value: What `pickle` takes; small.
            what: String that names what all processes do here.

        Raises:
            RuntimeError: if a process does not come in time.
        """
        values, missing = self._collect(value, what)
        if missing:
            raise RuntimeError(
                f"Process {self.index} waits for process(es) {missing} of "
                f"{self.count} at {what}, where they did not come within "
                f"{self.patience:g} seconds (KERAS_TP_TIMEOUT). All processes "
                "have to run the same program on batches of the same number."
            )
        return values

    def meet(self, what):
        """Waits until every process is here.

        Args:
            what: String that names what all processes have to call.

        Raises:
            RuntimeError: if a process does not come in time.
        """
        _, missing = self._collect(None, what)
        if missing:
            raise RuntimeError(
                f"{what} gathers tensors that are split over {self.count} "
                "processes, so every process has to call it. Process "
                f"{self.index} did, and others did not within "
                f"{self.patience:g} seconds: move the call out of any `if "
                "process_id == 0:`. Only one process writes the files. "
                f"Missing: process(es) {missing}"
            )

    def _collect(self, value, what):
        name = "keras_tp/" + what.replace(" ", "_").replace("`", "")
        number = self._rounds[what]
        self._rounds[what] += 1
        self._put(f"{name}/{number}/{self.index}", pickle.dumps(value))
        deadline = time.monotonic() + self.patience
        values, missing = [], []
        for index in range(self.count):
            left = max(deadline - time.monotonic(), 0.1)
            try:
                found = self._get(f"{name}/{number}/{index}", left)
                values.append(pickle.loads(found))
            except TimeoutError:
                missing.append(index)
        if number and not missing:
            # All are here, so all have read what they put before.
            self._delete(f"{name}/{number - 1}/{self.index}")
        return values, missing
