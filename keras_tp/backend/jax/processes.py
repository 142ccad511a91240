"""The processes of a run, each with some of the devices.

`jax.distributed` joins the processes, detects schedulers, notices a process
that died, and has a key-value store, which barriers use. The environment
variable KERAS_TP_TIMEOUT, read when this module is imported, says how many
seconds a process waits for the others. Defaults to 45.
"""

import math
import os
import time

import jax
from jax._src import clusters
from jax._src import distributed
from jax.experimental import multihost_utils

from keras_tp.backend.processes import consistency
from keras_tp.backend.processes import engines
from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import heartbeats
from keras_tp.backend.processes import progress
from keras_tp.backend.processes import rendezvous
from keras_tp.backend.processes import timeouts
from keras_tp.backend.processes.key_value_store import Store

TIMEOUT_S = timeouts.timeout()
# Seconds of silence after which JAX ends the other processes without naming the
# cause. Longer than the limits of `heartbeats`, which names it.
_HEARTBEAT_S = math.ceil(TIMEOUT_S + 3 * progress.GRACE_S)

_store = []


def world_size():
    """Returns the number of processes."""
    return jax.process_count()


def index():
    """Returns the index of this process."""
    return jax.process_index()


def is_first():
    """Returns whether this process prints and writes files for all."""
    return index() == 0


def are_on_cpus():
    """Returns whether the devices are CPUs that `jax.distributed` joins."""
    return jax.distributed.is_initialized() and jax.default_backend() == "cpu"


def start(job_addresses=None, num_processes=None, process_id=None):
    """Joins the other processes; later calls do nothing.

    JAX detects missing arguments from the scheduler that started the process,
    if it supports that scheduler. If all three remain unknown, this process is
    the only one.

    Args:
        job_addresses: String, comma-separated `host:port`; the address of
            process 0 is enough. Defaults to `None`.
        num_processes: Int, number of processes. Defaults to `None`.
        process_id: Int, index of this process. Defaults to `None`.
    """
    if jax.distributed.is_initialized():
        return
    addresses = job_addresses.split(",") if job_addresses else [None]
    if len(addresses) > 1 and num_processes not in (None, len(addresses)):
        raise ValueError(
            f"job_addresses has {len(addresses)} jobs, but num_processes is "
            f"{num_processes}. Pass the address of process 0, or the addresses "
            f"of all processes. Received: job_addresses={job_addresses!r}; "
            f"num_processes={num_processes}"
        )
    began = time.monotonic()
    address, count, own = (
        clusters.ClusterEnv.auto_detect_unset_distributed_params(
            addresses[0] or os.environ.get("JAX_COORDINATOR_ADDRESS"),
            *(num_processes, process_id, None, None, math.ceil(TIMEOUT_S)),
        )[:3]
    )
    if None in (address, count, own):
        # Such as Open MPI 5, which JAX does not detect.
        found, count, own = engines.fill(address, count, own)
        address = found and found.split(",")[0]
        addresses, num_processes, process_id = [address], count, own
    if (address, count, own) == (None, None, None):
        return
    if None in (address, count, own):
        raise ValueError(
            "To join the processes, JAX needs the address of process 0, the "
            "number of processes and the index of this process. No scheduler "
            "that JAX supports provides the missing values. Set "
            "KERAS_DISTRIBUTION_JOB_ADDRESSES, "
            "KERAS_DISTRIBUTION_NUM_PROCESSES and "
            "KERAS_DISTRIBUTION_PROCESS_ID. Received: "
            f"job_addresses={address!r}; num_processes={count}; "
            f"process_id={own}"
        )
    if not 0 <= own < count:
        raise ValueError(
            f"`process_id` has to be from 0 to {count - 1}. Received: "
            f"process_id={own}; num_processes={count}"
        )
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # Otherwise JAX takes SIGTERM as a notice, and the process goes on.
        jax.config.update("jax_enable_preemption_service", False)
    if count > 1:
        # Programs of one device then run one after the other. For programs of
        # several devices, see `programs`.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    rendezvous.meet(address, count, own, TIMEOUT_S)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    bound = None
    if own == 0 and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        # Otherwise JAX's coordinator listens at all addresses of this host.
        bound = rendezvous.bound_address(host, int(port))
    left = TIMEOUT_S - (time.monotonic() - began)
    jax.distributed.initialize(
        # The original arguments: JAX detects missing ones itself.
        addresses[0],
        num_processes,
        process_id,
        initialization_timeout=max(5, math.ceil(left)),
        coordinator_bind_address=bound,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
    )
    error_propagation.together(store(), _put, _get)
    heartbeats.start(
        host, own, count, _put, _get, TIMEOUT_S, error_propagation.end_now
    )


def store():
    """Returns the `Store` of the run."""
    if not _store:
        joined = distributed.global_state
        if joined.client is None:
            raise RuntimeError(
                "JAX runs in several processes, but this process has not "
                "joined the others. Call `keras_tp.distribution.initialize` "
                "before anything else."
            )
        delete = joined.client.key_value_delete
        place = joined.process_id, joined.num_processes
        _store.append(Store(_put, _get, delete, *place, TIMEOUT_S))
    return _store[0]


def gather(value, what):
    """Returns a list of one small value per process. A collective."""
    if world_size() == 1:
        return [value]
    return store().gather(value, what)


def send_to_first(array, into):
    """Sends bytes of each process to the rows of `into`. A collective.

    `array` has one dim, whose size is a multiple of 8 and equal everywhere.
    `into` is `None` in all processes but the first.
    """
    rows = multihost_utils.process_allgather(array)
    if into is not None:
        into[...] = rows


def meet(what):
    """Waits for all processes; raises if one does not come. A collective."""
    if world_size() > 1:
        store().meet(what)


def from_first(value):
    """Returns the value of process 0 in every process. A collective."""
    return gather(value if is_first() else None, "a value of process 0")[0]


def same_model(model):
    """Raises on every process unless all hold the same model. A collective."""
    if world_size() > 1:
        consistency.same_model(
            lambda v: gather(v, "the start of a model"), model
        )


def same_array(array):
    """Raises on every process unless all hold the same array. A collective."""
    if world_size() > 1:
        consistency.same_array(
            lambda v: gather(v, "the value of a tensor"), array
        )


def random_state():
    """Returns the state of JAX's own random generators: an empty dict.

    JAX has no generator besides Keras's counters.
    """
    return {}


def set_random_state(state):
    """Does nothing: JAX has no random state of its own."""


def agree_on_seed():
    """Sets the random state of process 0 in all processes.

    A collective.
    """
    if world_size() > 1:
        consistency.one_seed(
            lambda v: gather(v, "the choice of a seed"), is_first()
        )


def _put(key, value):
    distributed.global_state.client.key_value_set_bytes(key, value)


def _get(key, seconds):
    client = distributed.global_state.client
    try:
        return client.blocking_key_value_get_bytes(key, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as e:
        if "DEADLINE_EXCEEDED" in str(e):
            raise TimeoutError(key) from e
        raise
