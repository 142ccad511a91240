"""Runs programs of several CPU devices one after the other.

XLA runs a program that spans devices in the background, and launches the next
one meanwhile. On CPUs, programs that overlap can fail:

- The devices of a process share a thread pool. A device that waits in a
  collective holds its thread. If programs are independent, as eager operations
  are, the other devices of the collective may get no thread: a deadlock. So a
  program with collectives starts after the previous one has ended. A train
  step does not wait: it takes the state that the previous step returns, which
  orders the two steps on every device.
- Without a limit, many steps of about a millisecond hang, with plain Keras too.
  The likely reason: XLA lets 32 programs be under way, and threads of that pool
  wait to launch the next one. So a step is launched when all but the last few
  have ended, and then none has been seen to hang.
- Across processes, messages are matched by order, not by program; overlapping
  programs receive each other's data. If the sizes differ, that is an error; if
  not, the values are wrong. So the process waits for the end of every program.

`jax_cpu_enable_async_dispatch` applies to programs of one device only.
"""

import collections
import functools
import threading
import weakref

import jax

from keras_tp.backend import hlo_collectives
from keras_tp.backend.jax import processes

_COLLECTIVES = (*hlo_collectives.OPCODES, "collective-broadcast")
# In the HLO text of a program that updates donated state.
_UPDATES = "input_output_alias"

# Steps that may be under way: enough to keep the devices busy.
_MOST_STEPS = 4

# Executable -> whether its program has to run alone.
_alone = weakref.WeakKeyDictionary()
# A result of the last launched program with collectives.
_last = []
_lock = threading.Lock()


def hook_fast_path(original):
    """Keeps these programs off JAX's fast path, which skips `hook_call`."""

    @functools.wraps(original)
    def _get_fastpath_data(executable, *args, **kwargs):
        call = getattr(executable, "unsafe_call", None)
        if call is not None and (_is_waited_for(call) or _is_alone(call)):
            return None
        return original(executable, *args, **kwargs)

    return _get_fastpath_data


def hook_call(original):
    """Waits for the previous program; with several processes, for this one."""

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
                # The program that takes a donated result waits for it.
                if not result.is_deleted():
                    result.block_until_ready()
            results = original(self, *args)
            _note(results)
            return results

    return __call__


def make_function(original, self, *args, **kwargs):
    """Keeps a result of a step of `fit`, which JAX runs past `hook_call`."""
    function = original(self, *args, **kwargs)
    if jax.default_backend() != "cpu":
        return function
    under_way = collections.deque()

    @functools.wraps(function)
    def noted(state, iterator):
        if len(under_way) == _MOST_STEPS:
            oldest = under_way.popleft()
            jax.block_until_ready([x for x in oldest if not x.is_deleted()])
        outputs, state = function(state, iterator)
        _note(outputs)
        under_way.append(list(_last))
        return outputs, state

    return noted


def _note(results):
    """Keeps the smallest result; all results of a program end together."""
    arrays = [
        leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)
    ]
    _last[:] = [min(arrays, key=lambda array: array.size)] if arrays else []


def _is_waited_for(call):
    return _is_on_cpus(call) and processes.world_size() > 1


def _is_alone(call):
    """Returns whether a CPU program has collectives and updates no state."""
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
