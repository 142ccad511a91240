"""The processes of a run: DTensor clients, each with some of the devices.

They meet through the key-value store of TensorFlow's coordination service. The
environment variable KERAS_TP_TIMEOUT, read when this module is imported, says
how many seconds a process waits for the others. Defaults to 45.
"""

import base64
import os

import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from keras_tp.backend.processes import consistency
from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import heartbeats
from keras_tp.backend.processes import rendezvous
from keras_tp.backend.processes import timeouts
from keras_tp.backend.processes.key_value_store import Store
from keras_tp.backend.tensorflow import devices

TIMEOUT_S = timeouts.timeout()

# Of the collective that is not part of a program of DTensor.
_GATHER_KEY = 2**30

_store = []


def world_size():
    """Returns the number of processes."""
    return dtensor.num_clients()


def index():
    """Returns the index of this process."""
    return dtensor.client_id()


def is_first():
    """Returns whether this process prints and writes files for all."""
    return index() == 0


def kind():
    """Returns the type of device that DTensor runs on, such as `"CPU"`."""
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def start(job_addresses=None, num_processes=None, process_id=None):
    """Joins the other processes; later calls do nothing.

    Arguments that are `None` are read from DTensor's environment variables. If
    these are not set either, this process is the only one.
    """
    if _store:
        return
    given = {
        "DTENSOR_JOBS": job_addresses,
        "DTENSOR_NUM_CLIENTS": num_processes,
        "DTENSOR_CLIENT_ID": process_id,
    }
    if num_processes == 1 and not os.environ.get("DTENSOR_JOBS"):
        return
    settings = {}
    for name, value in given.items():
        set_before = os.environ.get(name)
        settings[name] = set_before if value is None else str(value)
        if value is not None and (set_before or str(value)) != str(value):
            raise ValueError(
                f"The environment variable {name} differs from the argument of "
                "`initialize`, or from the variables KERAS_DISTRIBUTION_*. Set "
                f"only one of them. Received: {name}={set_before}; {value!r}"
            )
    jobs = list(filter(None, (settings["DTENSOR_JOBS"] or "").split(",")))
    count = int(settings["DTENSOR_NUM_CLIENTS"] or 1)
    if len(jobs) != count and (jobs or count > 1):
        raise ValueError(
            "TensorFlow needs the `host:port` of every process, separated by "
            f"commas. Received: job_addresses={','.join(jobs)!r}; "
            f"num_processes={count}"
        )
    if not jobs:
        return
    os.environ.update({k: v for k, v in settings.items() if v is not None})
    os.environ.setdefault("DTENSOR_JOB_NAME", "worker")
    rendezvous.meet(jobs[0], len(jobs), index(), TIMEOUT_S)
    devices.make_virtual()
    dtensor.initialize_accelerator_system(kind())
    error_propagation.keep_signals()
    client = context.context()
    _store.append(
        Store(
            _put,
            _get,
            client.delete_config_key_value,
            index=index(),
            count=world_size(),
            patience=TIMEOUT_S,
        )
    )
    error_propagation.together(_store[0], _put, _get, tf.errors.OpError)
    host = jobs[0].rpartition(":")[0].strip("[]")
    heartbeats.start(
        host,
        index(),
        world_size(),
        _put,
        _get,
        TIMEOUT_S,
        error_propagation.end_now,
    )


def gather(value, what):
    """Returns a list of one small value per process. A collective."""
    if world_size() == 1:
        return [value]
    return _opened().gather(value, what)


def send_to_first(array, into):
    """Sends bytes of each process to the rows of `into`. A collective.

    `array` has one dim, whose size is a multiple of 8 and equal everywhere.
    `into` is `None` in all processes but the first.
    """
    job = tf.config.list_logical_devices("CPU")[0].name.rpartition("/task:")[0]
    with tf.device(f"{job}/task:{index()}/device:CPU:0"):
        # TensorFlow gathers no bytes.
        rows = tf.raw_ops.CollectiveGatherV2(
            input=tf.constant(array.view("int64")[None]),
            group_size=world_size(),
            group_key=_GATHER_KEY,
            # TensorFlow expects the size of the first call in others of a key.
            instance_key=_GATHER_KEY + array.size // 8,
            ordering_token=[],
        )
    if into is not None:
        into[...] = rows.numpy().view("uint8")


def meet(what):
    """Waits until every process is here; raises if one does not come."""
    if world_size() > 1:
        _opened().meet(what)


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
    """Returns the state of TensorFlow's own random generators: none.

    The state of its data pipelines cannot be read.
    """
    return {}


def set_random_state(state):
    """Restores the state that `random_state` returned."""


def agree_on_seed():
    """Sets the random state of all processes to the one of process 0.

    A collective.
    """
    if world_size() > 1:
        consistency.one_seed(
            lambda v: gather(v, "the choice of a seed"), is_first()
        )


def _opened():
    if not _store:
        raise RuntimeError(
            "DTENSOR_JOBS names several processes, but this process has not "
            "joined the others. Call `keras_tp.distribution.initialize` before "
            "anything else."
        )
    return _store[0]


def _put(key, value):
    text = base64.b64encode(value).decode()
    try:
        context.context().set_config_key_value(key, text)
    except tf.errors.OpError as e:
        raise RuntimeError(str(e)) from e


def _get(key, seconds):
    milliseconds = max(1, int(seconds * 1000))
    try:
        text = context.context().get_config_key_value(key, milliseconds)
    except tf.errors.DeadlineExceededError as e:
        raise TimeoutError(key) from e
    except tf.errors.OpError as e:
        raise RuntimeError(str(e)) from e
    return base64.b64decode(text)
