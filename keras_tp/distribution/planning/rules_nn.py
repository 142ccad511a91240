"""Rules for neural network operations and for layers that are leaves."""

from keras_tp.distribution.planning.rules import leaf_rule
from keras_tp.distribution.planning.rules import rule
from keras_tp.distribution.planning.rules_math import IN_ATTENTION
from keras_tp.distribution.planning.rules_math import axes_of


@rule("LayerNorm", "RMSNorm")
def normalization(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    dims.elementwise(step.inputs, output)
    for i in axes_of(step.operation.axis, x.ndim):
        dims.keep(x, i, "normalized over this dim")


@rule("BatchNorm")
def batch_normalization(dims, step):
    x, *parameters = step.inputs
    k = step.operation.axis % x.ndim
    dims.elementwise([x], step.outputs[0])
    for parameter in parameters:
        dims.same(parameter, 0, x, k)


@rule("DotProductAttention")
def dot_product_attention(dims, step):
    query, key, value, *rest = step.inputs
    output = step.outputs[0]
    for x in (key, value):
        if x.shape[2] == query.shape[2]:
            dims.same(x, 2, query, 2)
        else:
            dims.repeated(x, 2, query, 2)
    for i in (0, 1, 2):
        dims.same(query, i, output, i)
    for x in (key, value):
        dims.same(x, 0, output, 0)
    for x in (query, key, value, output):
        dims.head(x, 2)
        dims.keep(x, 3, IN_ATTENTION)
    for x in (key, value, *([query] if step.operation.is_causal else [])):
        dims.keep(x, 1, IN_ATTENTION)
    for mask in rest:
        if mask.ndim == 4:
            dims.same(mask, 1, query, 2)


def _channels(step, x):
    first = getattr(step.operation, "data_format", None) == "channels_first"
    return 1 if first else x.ndim - 1


def _keep_windows(dims, step, x, output, kernels):
    for i in range(1, x.ndim):
        if i != _channels(step, x):
            dims.keep(x, i, "convolved")
            dims.keep(output, i, "convolved")
    for kernel in kernels:
        for i in range(kernel.ndim - 2):
            dims.keep(kernel, i, "window of a convolution")


@rule("Conv", "ConvTranspose")
def convolution(dims, step):
    x, kernel = step.inputs
    output = step.outputs[0]
    channels = _channels(step, x)
    _keep_windows(dims, step, x, output, [kernel])
    dims.same(x, 0, output, 0)
    # A transposed convolution's kernel has its output channels first.
    i, o = (-2, -1) if step.kind == "Conv" else (-1, -2)
    if kernel.shape[i] == x.shape[channels]:
        _mix(dims, x, channels, kernel, i, o, output)
    else:
        _keep_groups(dims, [x, kernel, output])


def _mix(dims, x, channels, kernel, i, o, output):
    dims.same(x, channels, kernel, i)
    dims.partial(kernel, i, output)
    dims.same(kernel, o, output, channels)
    dims.partial(kernel, o, x, backward=True)


def _keep_groups(dims, values):
    dims.keep_whole(values, "grouped convolution")


@rule("DepthwiseConv", "SeparableConv")
def depthwise_convolution(dims, step):
    x, kernel, *pointwise = step.inputs
    output = step.outputs[0]
    channels = _channels(step, x)
    _keep_windows(dims, step, x, output, [kernel, *pointwise])
    dims.same(x, 0, output, 0)
    if kernel.shape[-1] != 1:
        return _keep_groups(dims, [x, kernel, *pointwise, output])
    dims.same(x, channels, kernel, -2)
    if pointwise:
        _mix(dims, x, channels, pointwise[0], -2, -1, output)
    else:
        dims.same(x, channels, output, channels)


@leaf_rule("Conv1D", "Conv2D", "Conv3D")
def grouped_convolution(dims, step):
    """Splits a convolution with one channel per group; others stay whole."""
    x, output = step.inputs[0], step.outputs[0]
    kernel, *bias = step.variables
    channels = _channels(step, x)
    if not step.operation.groups == x.shape[channels] == output.shape[channels]:
        return _keep_groups(dims, [x, output, *step.variables])
    _keep_windows(dims, step, x, output, [kernel])
    dims.same(x, 0, output, 0)
    dims.same(x, channels, output, channels)
    dims.same(kernel, -1, output, channels)
    for value in bias:
        dims.same(value, 0, output, channels)


@rule(
    "MaxPool",
    "AveragePool",
    "AdaptiveMaxPool",
    "AdaptiveAveragePool",
    "Resize",
)
def pooling(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    channels = _channels(step, x)
    for i in range(x.ndim):
        if i == channels or (i == 0 and x.ndim > 3):
            dims.same(x, i, output, i)
        else:
            dims.keep(x, i, "pooled")
            dims.keep(output, i, "pooled")


# Layer -> gates, whose kernels are blocks of one dim.
_GATES = {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}


@leaf_rule(*_GATES)
def recurrent(dims, step):
    """Splits the units, of each gate, or the features of the input."""
    layer, x, output = step.operation, step.inputs[0], step.outputs[0]
    kernel, *others = step.variables
    dims.same(x, -1, kernel, 0)
    dims.partial(kernel, 0, output)
    dims.in_loops.update(value.index for value in step.variables[:2])
    dims.keep(x, 1, "time steps")
    if not _splits_units(layer):
        why = "recurrent: the gates of a unit need all units at every time step"
        dims.keep(kernel, -1, why)
        return dims.keep_whole([*others, *step.outputs], why)
    gates = _GATES[step.kind]
    for value in step.variables:
        if gates > 1:
            dims.block(value, -1, output, -1, gates, is_split=True)
        else:
            dims.same(value, -1, output, -1)
    for state in [*step.inputs[1:], *step.outputs[1:]]:
        dims.same(state, -1, output, -1)
    dims.keep(others[0], 0, "recurrent: a time step needs all units before it")
    for bias in others[1:]:
        if bias.ndim > 1:
            dims.keep(bias, 0, "one for the input, one for the state")
    dims.partial(output, -1, x, backward=True)
    dims.states.append(((output.index, output.ndim - 1), output))


def _splits_units(layer):
    """Returns whether a layer computes the gates of some units alone.

    It has to split products of all gates at once, and no fused kernel of cuDNN
    may be asked for.
    """
    return (
        not layer.stateful
        and getattr(layer, "use_cudnn", "auto") is not True
        and getattr(layer.cell, "implementation", 2) == 2
        and getattr(layer.cell, "reset_after", True)
    )


@leaf_rule("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "RNN")
def recurrent_cells(dims, step):
    why = "recurrent: each time step would communicate"
    dims.keep_whole([*step.inputs, *step.variables, *step.outputs], why)
