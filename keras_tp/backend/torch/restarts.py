"""Restarts by torchrun, which keeps the store of the processes that ended."""

import os
import secrets
import time

import torch.distributed as dist

_START = "keras_tp/start"
_POLL_S = 0.05


def is_possible():
    """Returns whether torchrun may start the processes of this run again."""
    count = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return dist.is_torchelastic_launched() and count != "0"


def new_store(timeout):
    """Returns a store that has no keys of processes that have ended.

    gloo would connect to the addresses of those.

    Args:
        timeout: `datetime.timedelta`. How long to wait for other processes.

    Returns:
        The arguments `store`, `rank` and `world_size` of `init_process_group`.

    Raises:
        TimeoutError: if not all processes come.
    """
    store, rank, count = next(dist.rendezvous("env://", timeout=timeout))
    start = prefix(store, rank, count, timeout)
    prefixed = dist.PrefixStore(start, store)
    return {"store": prefixed, "rank": rank, "world_size": count}


def prefix(store, rank, count, timeout):
    """Returns the prefix of the keys of one start, equal in its processes.

    The number of restarts that torchrun tells may differ between hosts.
    Process 0 draws a name instead, and answers those who ask by this name.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        name = _invite(store, count, deadline)
    else:
        name = _join(store, rank, deadline)
    return f"{_START}/{name}"


def _invite(store, count, deadline):
    """Names this start, and answers each of the other processes."""
    name = secrets.token_hex(8)
    store.set(_START, name)
    for rank in range(1, count):
        asked = f"{_START}/{name}/{rank}"
        _wait(lambda asked=asked: store.check([asked]), deadline, rank)
        store.set(f"{asked}/{store.get(asked).decode()}", "")
    return name


def _join(store, rank, deadline):
    """Returns the name of this start. An older one is not answered."""
    own, found = secrets.token_hex(8), []

    def is_answered():
        if not store.check([_START]):
            return False
        name = store.get(_START).decode()
        if found[-1:] != [name]:
            found.append(name)
            store.set(f"{_START}/{name}/{rank}", own)
        return store.check([f"{_START}/{name}/{rank}/{own}"])

    _wait(is_answered, deadline, 0)
    return found[-1]


def _wait(is_there, deadline, rank):
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"Process {rank} did not join the others after a restart by "
                "torchrun. Its own output may say why."
            )
        time.sleep(_POLL_S)
