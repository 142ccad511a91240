"""Recurrent layers whose units are split over the devices.

Each device computes all gates of its units. It needs the whole state before:
backends gather it at each time step. A kernel has a block for each gate, split
alike, so the product of one time step is split to gates without communication.
"""

from keras.src import ops
from keras.src import tree
from keras.src.layers.rnn.rnn import RNN

from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import around


def _splits_gates(cell):
    """Returns whether the kernel of a cell is split in blocks."""
    layout = getattr(cell.recurrent_kernel, "_layout", None)
    return bool(getattr(layout, "blocks", None))


@around
def _hook_inner_loop(original, self, /, *args, **kwargs):
    """Computes step by step: fused functions would gather the kernels."""
    if _splits_gates(self.cell) and self.use_cudnn is not True:
        return RNN.inner_loop(self, *args, **kwargs)
    return original(self, *args, **kwargs)


@around
def _hook_gru_cell(original, self, /, inputs, states, training=False):
    """Computes as Keras's cell, but splits products where it slices them."""
    is_fused = self.reset_after and self.implementation == 2
    if not (_splits_gates(self) and is_fused):
        return original(self, inputs, states, training=training)
    is_nested = tree.is_nested(states)
    before = states[0] if is_nested else states
    if training and 0.0 < self.dropout < 1.0:
        inputs = inputs * self.get_dropout_mask(inputs)
    of_input = ops.split(ops.matmul(inputs, self.kernel), 3, axis=-1)
    of_state = ops.split(ops.matmul(before, self.recurrent_kernel), 3, axis=-1)
    if self.use_bias:
        biases = ops.split(self.bias, 3, axis=-1)
        of_input = [x + bias[0] for x, bias in zip(of_input, biases)]
        of_state = [x + bias[1] for x, bias in zip(of_state, biases)]
    update, reset = (
        self.recurrent_activation(x + y)
        for x, y in zip(of_input[:2], of_state[:2])
    )
    candidate = self.activation(of_input[2] + reset * of_state[2])
    state = update * before + (1 - update) * candidate
    return state, [state] if is_nested else state


_ONE_BY_ONE = "units that are split are computed step by step"

TABLE = [
    Hook(
        "keras.src.layers.rnn.lstm:LSTM",
        "inner_loop",
        _hook_inner_loop,
        _ONE_BY_ONE,
    ),
    Hook(
        "keras.src.layers.rnn.gru:GRU",
        "inner_loop",
        _hook_inner_loop,
        _ONE_BY_ONE,
    ),
    Hook(
        "keras.src.layers.rnn.gru:GRUCell",
        "call",
        _hook_gru_cell,
        "gates that are split are not gathered to be sliced",
    ),
]
