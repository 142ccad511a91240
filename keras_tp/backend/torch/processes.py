"""The processes of a run: one per device, joined by torch.distributed.

torch's default group moves tensors. Two gloo groups are for control: on them
processes meet before a collective, and exchange small values. They differ in
their timeouts only.

The environment variable KERAS_TP_TIMEOUT, read when this module is imported,
says how many seconds a process waits for the others. Defaults to 45. If a
process does not arrive in this time, all of them stop with an error.
"""

import atexit
import contextlib
import datetime
import functools
import gc
import os
import random
import sys
import time
import traceback

import numpy as np
import torch
import torch.distributed as dist
from keras.src.backend.common import global_state
from keras.src.backend.torch import core
from torch.distributed.device_mesh import DeviceMesh

from keras_tp.backend.processes import consistency
from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import heartbeats
from keras_tp.backend.processes import messages
from keras_tp.backend.processes import progress
from keras_tp.backend.processes import rendezvous
from keras_tp.backend.processes import timeouts

_control = None
_failed = []


TIMEOUT_S = timeouts.timeout()
_SETTLE_S = 1.0
_BATCH = "the start of a batch"


def world_size():
    """Returns the number of processes, started or about to be."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def index():
    """Returns the index of this process."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def is_first():
    """Returns whether this process prints and writes files for all."""
    return index() == 0


def uses_cuda():
    """Returns whether Keras puts tensors on CUDA devices."""
    return str(core.get_device()).startswith(("cuda", "gpu"))


def start(init_method=None, num_processes=None, process_id=None):
    """Joins the other processes; later calls do nothing.

    Without arguments, torchrun's environment variables are read. If they are
    not set, this process is the only one.

    Args:
        init_method: String, such as `"tcp://host:port"`. Defaults to `None`.
        num_processes: Int. Defaults to `None`.
        process_id: Int. Defaults to `None`.
    """
    global _control
    if not dist.is_initialized():
        # Longer than the limits of `meet` and the heartbeats, because their
        # errors name the missing process.
        seconds = TIMEOUT_S + 2 * progress.GRACE_S
        options = {"timeout": datetime.timedelta(seconds=seconds)}
        if uses_cuda():
            # No `device_id`, because the control groups are on gloo.
            torch.cuda.set_device(_local_index(process_id))
            options["backend"] = "cpu:gloo,cuda:nccl"
        else:
            options["backend"] = "gloo"
        if init_method is not None:
            address = init_method.removeprefix("tcp://")
            rendezvous.meet(address, num_processes, process_id, TIMEOUT_S)
            options.update(
                init_method=init_method,
                world_size=num_processes,
                rank=process_id,
            )
        elif "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            options.update(store=dist.HashStore(), world_size=1, rank=0)
        elif not dist.is_torchelastic_launched():
            # torchelastic's agents meet before they start processes.
            names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
            host, port, *rest = (os.environ.get(name) for name in names)
            if host and port:
                rendezvous.meet(f"{host}:{port}", *map(int, rest), TIMEOUT_S)
        dist.init_process_group(**options)
        atexit.register(_leave)
        sys.excepthook = functools.partial(_note_failure, sys.excepthook)
        _start_watch(init_method)
    if _control is None or _control[0] is not dist.group.WORLD:
        # The second is for longer waits: in a barrier, all but process 0 wait
        # as long as the timeout of its group.
        groups = (
            dist.new_group(
                backend="gloo", timeout=datetime.timedelta(seconds=seconds)
            )
            for seconds in (TIMEOUT_S, max(TIMEOUT_S, timeouts.LONGEST_S))
        )
        _control = (dist.group.WORLD, *groups)


def _start_watch(init_method):
    if world_size() == 1:
        return
    address = (init_method or "").removeprefix("tcp://").rpartition(":")[0]
    host = address or os.environ["MASTER_ADDR"]
    store = dist.distributed_c10d._get_default_store()

    def get(key, seconds):
        store.wait([key], datetime.timedelta(seconds=seconds))
        return store.get(key)

    heartbeats.start(
        *(host.strip("[]"), index(), world_size(), store.set, get),
        *(TIMEOUT_S, error_propagation.end_now),
    )


def _note_failure(report, kind, error, trace):
    _failed.append(True)
    report(kind, error, trace)
    heartbeats.leave(traceback.format_exception_only(kind, error)[0].strip())


def _leave():
    """Ends the threads of process groups before the interpreter ends.

    A thread needs the interpreter to free the tensors of a finished collective,
    and aborts the process if the interpreter has ended.
    """
    global _control
    error_propagation.note_end()
    if _failed:
        # Gives the others time to report their own errors, before the launcher
        # ends them because of this process.
        time.sleep(_SETTLE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for pending collectives to time out.
        os._exit(1)
    heartbeats.leave()
    if not dist.is_initialized() or hasattr(sys, "last_value"):
        return
    _control = None
    for found in gc.get_objects():
        if issubclass(type(found), DeviceMesh):
            # A mesh would keep its process groups alive.
            found._pg_registry.clear()
    dist.destroy_process_group()


def collective_library(device_type):
    """Returns the name of the process group's library for a type of device."""
    start()
    kind = "cuda" if device_type == "gpu" else device_type
    # Such as "cpu:gloo,cuda:nccl".
    libraries = dist.get_backend_config().split(",")
    return dict(entry.split(":") for entry in libraries)[kind]


def meet(what):
    """Waits until every process is here.

    Args:
        what: String that names the call, for the error.

    Raises:
        RuntimeError: after `TIMEOUT_S` seconds (`timeouts.LONGEST_S` within
            `longer`), or as soon as a missing process ends. On process 0 the
            error names the missing processes.
    """
    if world_size() == 1 or not dist.is_initialized():
        return
    start()
    seconds = timeouts.patience(TIMEOUT_S)
    _note_place(what)
    began = time.monotonic()
    try:
        with progress.meeting(what):
            dist.monitored_barrier(
                _control[1 if seconds == TIMEOUT_S else 2],
                timeout=datetime.timedelta(seconds=seconds),
                wait_all_ranks=True,
            )
    except RuntimeError as e:
        if time.monotonic() - began < seconds:
            raise RuntimeError(
                f"Process {index()} of {world_size()} waits for the others "
                f"at {what.strip(',')}, and one of them has ended. As torch "
                f"says: {e}"
            ) from e
        raise RuntimeError(
            timeouts.not_called_by_all(
                *(what, index(), world_size(), seconds),
                f"as torch says, {e}.",
            )
            + _meanwhile(what)
        ) from e
    _note_place("")


def longer():
    """Returns a context in which processes wait longer for a slow one."""
    return timeouts.longer()


def same_everywhere(what, value, way_out, groups=None):
    """Raises on every process unless all of them hold the same value.

    Args:
        what: String that names the value.
        value: Bytes, or an object that can be pickled. Its digest is compared.
        way_out: String, a sentence on how to make the values equal.
        groups: List with the group of each process; values have to be equal
            within a group. Defaults to `None`: all are one group.

    Returns:
        List with the digest of each process.
    """
    if world_size() == 1:
        return [None]
    return consistency.same_everywhere(
        lambda v: _gather(v, f"the comparison of {what}"),
        *(what, value, way_out, groups),
    )


def same_model(model):
    """Raises on every process unless all hold the same model. A collective."""
    if world_size() > 1:
        consistency.same_model(
            lambda v: _gather(v, "the start of a model"), model
        )


def same_values(variable):
    """Raises on every process unless all hold the same plain variable.

    A collective.
    """
    if world_size() > 1:
        what = f"values of {variable.path!r}"
        consistency.same_array(
            lambda v: _gather(v, f"the {what}"),
            core.convert_to_numpy(variable._value),
            what,
        )


def agree_on_seed():
    """Copies the random state of process 0 to all processes.

    Initial values, shuffling and dropout masks are then equal in all processes.

    Raises:
        ValueError: on every process, if they were given different seeds.
    """
    if world_size() == 1:
        return
    consistency.same_seed(lambda v: _gather(v, "the choice of a seed"))
    generator = global_state.get_global_attribute("global_seed_generator")
    counter = None
    if generator is not None:
        counter = core.convert_to_numpy(generator.state.value)
    python, numpy, state, counter = from_first(
        (random.getstate(), np.random.get_state(), random_state(), counter)
    )
    random.setstate(python)
    np.random.set_state(numpy)
    set_random_state(state)
    if generator is not None and counter is not None:
        generator.state.assign(counter)


def rng_state():
    """Returns the state of torch's generators that this process uses."""
    state = {"cpu": torch.get_rng_state()}
    if uses_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def random_state():
    """Returns the state of torch's generators, as arrays of bytes."""
    return {name: held.numpy() for name, held in rng_state().items()}


def set_random_state(state):
    """Restores the state that `random_state` returned."""
    set_rng_state(
        {name: torch.from_numpy(held) for name, held in state.items()}
    )


def rng_bytes():
    """Returns the state of torch's generator as bytes."""
    return rng_state()["cpu"].numpy().tobytes()


def set_rng_state(state):
    """Restores the state that `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def gather_numbers(numbers):
    """Returns a list of the ints of every process, equally many in each.

    A collective, cheaper than `gather_by_process`.
    """
    if world_size() == 1:
        return [tuple(numbers)]
    start()
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    with _named(_BATCH):
        found = _all_gather(own)
    return [tuple(tensor.tolist()) for tensor in found]


def gather_by_process(value, what):
    """Returns a list of one small value per process. A collective.

    Args:
        value: A small value that `messages.encode` accepts.
        what: String that names this exchange, for the error.
    """
    return _gather(value, what)


def from_first(value):
    """Returns the value of process 0 in every process. A collective."""
    if world_size() == 1:
        return value
    start()
    data = messages.encode(value) if is_first() else b""
    size = torch.tensor([len(data)], device="cpu")
    with _named("a value of process 0"):
        dist.broadcast(size, src=0, group=_control[1])
        data = _as_tensor(data, size.item())
        dist.broadcast(data, src=0, group=_control[1])
    return messages.decode(data.numpy().tobytes())


def _local_index(process_id):
    """Returns the index of this process's device on this host."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return (process_id or 0) % torch.cuda.device_count()


@contextlib.contextmanager
def _named(what):
    """Names a collective in the error for a process that is missing."""
    try:
        with progress.meeting(what):
            yield
    except RuntimeError as e:
        raise RuntimeError(
            f"Process {index()} waits for the other {world_size() - 1} at "
            f"{what}. One of them ended, or did not come within "
            f"{TIMEOUT_S:g} seconds (KERAS_TP_TIMEOUT). All processes have to "
            "run the same program on batches of the same number. As torch "
            f"says: {e}.{_meanwhile(what)}"
        ) from e


def _place_key(process):
    return f"keras_tp/place/{process}"


def _note_place(what):
    """Publishes where this process waits, for the errors of others."""
    dist.distributed_c10d._get_default_store().set(_place_key(index()), what)


def _meanwhile(what):
    """Returns a sentence on processes that wait for something else."""
    places = {}
    try:
        store = dist.distributed_c10d._get_default_store()
        for process in range(world_size()):
            if store.check([_place_key(process)]):
                place = store.get(_place_key(process)).decode()
                places[process] = place
    except RuntimeError:
        # Process 0 has ended, and its store with it.
        return ""
    return timeouts.meanwhile(
        {
            process: place
            for process, place in places.items()
            if place not in ("", what)
        }
    )


def _gather(value, what):
    if world_size() == 1:
        return [value]
    start()
    data = messages.encode(value)
    _note_place(what)
    with _named(what):
        sizes = _all_gather(torch.tensor([len(data)], device="cpu"))
        longest = max(size.item() for size in sizes)
        found = _all_gather(_as_tensor(data, longest))
    _note_place("")
    return [
        messages.decode(held[: size.item()].numpy().tobytes())
        for held, size in zip(found, sizes)
    ]


def _all_gather(own):
    found = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(found, own, group=_control[1])
    return found


def _as_tensor(data, size):
    """Returns bytes as a nonempty tensor, zero-padded to a size."""
    padded = bytearray(data.ljust(max(size, 1), b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8)
