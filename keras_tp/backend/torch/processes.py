"""The processes of a run: one per device, joined by torch.distributed.

torch's process group moves tensors. Its key-value store synchronizes the
processes and exchanges small values. The environment variable KERAS_TP_TIMEOUT,
read when this module is imported, says how many seconds a process waits for the
others. Defaults to 45.
"""

import atexit
import contextlib
import datetime
import functools
import gc
import logging
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
from keras.src.backend.torch import core
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils

from keras_tp.backend.processes import consistency
from keras_tp.backend.processes import engines
from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import heartbeats
from keras_tp.backend.processes import messages
from keras_tp.backend.processes import progress
from keras_tp.backend.processes import rendezvous
from keras_tp.backend.processes import timeouts
from keras_tp.backend.processes.key_value_store import Store
from keras_tp.backend.torch import restarts

TIMEOUT_S = timeouts.timeout()
# Seconds that the others have to report their own errors after an error here.
_SETTLE_S = 1.0

_store = []
_failed = []


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
    if dist.is_initialized():
        return
    # Longer than the limits of `meet` and the heartbeats, because their errors
    # name the missing process.
    seconds = TIMEOUT_S + 2 * progress.GRACE_S
    options = {"timeout": datetime.timedelta(seconds=seconds)}
    if uses_cuda():
        # No `device_id`, because tensors on the host are exchanged too.
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
    elif restarts.is_possible():
        options.update(restarts.new_store(options["timeout"]))
    elif not dist.is_torchelastic_launched():
        # torchelastic's agents meet before they start processes.
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
        host, port, *rest = (os.environ.get(name) for name in names)
        if host and port:
            rendezvous.meet(f"{host}:{port}", *map(int, rest), TIMEOUT_S)
    dist.init_process_group(**options)
    logging.getLogger(_collective_utils.__name__).addFilter(_is_shown)
    atexit.register(_leave)
    sys.excepthook = functools.partial(_note_failure, sys.excepthook)
    if world_size() > 1:
        address = (init_method or "").removeprefix("tcp://").rpartition(":")[0]
        host = (address or os.environ["MASTER_ADDR"]).strip("[]")
        heartbeats.start(
            *(host, index(), world_size(), _put, _get),
            *(TIMEOUT_S, error_propagation.end_now),
        )


def _is_shown(record):
    """Returns whether a log record of DTensor tells the user anything.

    On CPUs, DTensor gathers instead of an all-to-all, and warns of that. The
    result is the same.
    """
    return "does not support alltoall" not in str(record.msg)


def _note_failure(report, kind, error, trace):
    _failed.append(True)
    error_propagation.explain(error)
    report(kind, error, trace)
    heartbeats.leave(traceback.format_exception_only(kind, error)[0].strip())


def _leave():
    """Ends the threads of process groups before the interpreter ends.

    A thread needs the interpreter to free the tensors of a finished collective,
    and aborts the process if the interpreter has ended.
    """
    error_propagation.note_end()
    if _failed:
        # Afterwards, the launcher ends the others because of this process.
        time.sleep(_SETTLE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for pending collectives to time out.
        os._exit(1)
    heartbeats.leave()
    if not dist.is_initialized() or hasattr(sys, "last_value"):
        return
    if not dist.is_torchelastic_launched():
        _let_others_read()
    for found in gc.get_objects():
        if issubclass(type(found), DeviceMesh):
            # A mesh would keep its process groups alive.
            found._pg_registry.clear()
    dist.destroy_process_group()


def _let_others_read():
    """Keeps the store, which process 0 holds, until the others have left."""
    key = "keras_tp/left/{}".format
    with contextlib.suppress(RuntimeError, TimeoutError):
        _put(key(index()), b"")
        for other in range(world_size() if is_first() else 0):
            _get(key(other), progress.GRACE_S)


def collective_library(device_type):
    """Returns the name of the process group's library for a type of device."""
    start()
    kind = "cuda" if device_type == "gpu" else device_type
    # Such as "cpu:gloo,cuda:nccl".
    libraries = dist.get_backend_config().split(",")
    return dict(entry.split(":") for entry in libraries)[kind]


def meet(what):
    """Waits for all processes; raises if one does not come. A collective."""
    if world_size() > 1:
        _opened().meet(what)


def gather(value, what):
    """Returns a list of one small value per process. A collective."""
    if world_size() == 1:
        return [value]
    return _opened().gather(value, what)


def gather_array(array):
    """Returns the arrays of all processes, equal in shape. A collective."""
    own = torch.from_numpy(array.reshape(-1).view("uint8"))
    found = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(found, own)
    return [
        part.numpy().view(array.dtype).reshape(array.shape) for part in found
    ]


def send_to_first(array, into):
    """Sends bytes of each process to the rows of `into`. A collective.

    `array` has one dim, whose size is a multiple of 8 and equal everywhere.
    `into` is `None` in all processes but the first.
    """
    if into is None:
        dist.send(torch.from_numpy(array), 0)
        return
    into[0] = array
    for index in range(1, world_size()):
        dist.recv(torch.from_numpy(into[index]), index)


def from_first(value):
    """Returns the value of process 0, of any size, in every process.

    A collective.
    """
    if world_size() == 1:
        return value
    data = bytearray(messages.encode(value) if is_first() else b"")
    # A value in the store can be 8 MiB at most, so the bytes are a tensor.
    size = gather(len(data), "a value of process 0")[0]
    tensor = torch.frombuffer(data or bytearray(size), dtype=torch.uint8)
    dist.broadcast(tensor, src=0)
    return messages.decode(tensor.numpy().tobytes())


def same_everywhere(what, value, way_out):
    """Raises on every process unless all hold the same value. A collective."""
    if world_size() > 1:
        consistency.same_everywhere(
            lambda v: gather(v, f"the comparison of {what}"),
            *(what, value, way_out),
        )


def same_model(model):
    """Raises on every process unless all hold the same model. A collective."""
    if world_size() > 1:
        consistency.same_model(
            lambda v: gather(v, "the start of a model"), model
        )


def same_values(variable):
    """Raises unless all hold the same plain variable. A collective."""
    if world_size() > 1:
        what = f"values of {variable.path!r}"
        consistency.same_array(
            lambda v: gather(v, f"the {what}"),
            core.convert_to_numpy(variable._value),
            what,
        )


def agree_on_seed():
    """Sets the random state of process 0 in all processes. A collective."""
    if world_size() > 1:
        consistency.one_seed(
            lambda v: gather(v, "the choice of a seed"), is_first()
        )
        set_random_state(from_first(random_state()))


def random_state():
    """Returns the state of torch's generators, as arrays of bytes."""
    state = {"cpu": torch.get_rng_state().numpy()}
    if uses_cuda():
        state["cuda"] = torch.cuda.get_rng_state().numpy()
    return state


def set_random_state(state):
    """Restores the state that `random_state` returned."""
    torch.set_rng_state(torch.from_numpy(state["cpu"]))
    if "cuda" in state:
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]))


def _opened():
    """Returns the `Store` of the run; joins the run first."""
    start()
    if not _store:
        _store.append(
            Store(_put, _get, _delete, index(), world_size(), TIMEOUT_S)
        )
    return _store[0]


def _put(key, value):
    dist.distributed_c10d._get_default_store().set(key, value)


def _get(key, seconds):
    store = dist.distributed_c10d._get_default_store()
    try:
        store.wait([key], datetime.timedelta(seconds=seconds))
    except dist.DistStoreError as e:
        raise TimeoutError(key) from e
    return store.get(key)


def _delete(key):
    dist.distributed_c10d._get_default_store().delete_key(key)


def _local_index(process_id):
    """Returns the index of this process's device on this host."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    engine = engines.find()
    local = (process_id or 0) if engine is None else engine.local_index
    # An engine may show each process its own device only.
    return local % torch.cuda.device_count()
