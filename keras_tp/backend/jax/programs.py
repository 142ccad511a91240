"""Programs of several CPU devices run one after the other.

XLA runs a program that spans devices in the background, and launches the next
one while it runs. On CPUs two programs that overlap can do harm:

- Devices of one process share a pool of threads. A device that waits in a
  collective holds its thread. Where programs do not depend on each other, as
  those of eager operations, the devices that they wait for may get no thread:
  a deadlock. So a program with collectives is launched after the one before it
  has ended. A train step is not held up: it takes the state that the step
  before it returns, which orders the two on every device.
- Devices of several processes exchange data in the order in which they send
  it, whatever program it is for. A device that is behind would pass its data
  to the wrong program: an error if sizes differ, wrong values if they do not.
  So every program is waited for.

`jax_cpu_enable_async_dispatch` concerns programs of one device only.
"""

import functools
import threading
import weakref

import jax

from keras_tp.backend.jax import processes

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "reduce-scatter",
)
# Of a program that updates donated state.
_UPDATES = "input_output_alias"

# Whether a program has to be launched alone, by its executable.
_alone = weakref.WeakKeyDictionary()
# A result of the program with collectives that was launched last.
_last = []
_lock = threading.Lock()


def hook_fast_path(original):
    """Programs that wait for others do not take JAX's path around `call`."""

    @functools.wraps(original)
    def _get_fastpath_data(executable, *args, **kwargs):
        call = getattr(executable, "unsafe_call", None)
        if call is not None and (_is_waited_for(call) or _is_alone(call)):
            return None
        return original(executable, *args, **kwargs)

    return _get_fastpath_data


def hook_call(original):
    """Waits for the program before this one, or for this one to end."""

    @functools.wraps(original)
    def __call__(self, *args):
        if _is_waited_for(self):
            results = original(self, *args)
            jax.block_until_ready(results)
            return results
        if not _is_alone(self):
            return original(self, *args)
        with _lock:
            for result in _last:
                # One that was donated is waited for by what took it.
                if not result.is_deleted():
                    result.block_until_ready()
            results = original(self, *args)
            _note(results)
            return results

    return __call__


def hook_make_function(original):
    """Notes what a step of `fit` returns, which JAX launches past `call`."""

    @functools.wraps(original)
    def _make_function(self, *args, **kwargs):
        function = original(self, *args, **kwargs)
        if jax.default_backend() != "cpu":
            return function

        @functools.wraps(function)
        def noted(state, iterator):
            outputs, state = function(state, iterator)
            _note(outputs)
            return outputs, state

        return noted

    return _make_function


def _note(results):
    """Notes the smallest result; all of a program are ready at once."""
    arrays = [
        leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)
    ]
    _last[:] = [min(arrays, key=lambda array: array.size)] if arrays else []


def _is_waited_for(call):
    return _is_on_cpus(call) and processes.world_size() > 1


def _is_alone(call):
    """Whether a program of CPUs has collectives, and no state to update."""
    if not _is_on_cpus(call) or len(call._local_devices) == 1:
        return False
    if call not in _alone:
        text = "".join(
            module.to_string() for module in call.xla_executable.hlo_modules()
        )
        _alone[call] = _UPDATES not in text and any(
            name in text for name in _COLLECTIVES
        )
    return _alone[call]


def _is_on_cpus(call):
    return getattr(getattr(call, "backend", None), "platform", None) == "cpu"
