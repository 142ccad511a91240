"""Rules for elementwise operations, contractions and reductions."""

import collections

from keras_tp.distribution.planning.graph import values_in
from keras_tp.distribution.planning.rules import leaf_rule
from keras_tp.distribution.planning.rules import rule

_GREEK = "αβγδεζηθ"
# One reason for all forms of attention, because backends use different forms.
IN_ATTENTION = "inside an attention head, or a position"


def axes_of(axis, ndim):
    """Returns the list of dims that an `axis` argument names."""
    if axis is None:
        return list(range(ndim))
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return [i % ndim for i in axes]


@rule(
    *"""Abs Absolute Add Arctan Arctan2 BitwiseAnd BitwiseOr BitwiseXor
    BroadcastTo Cast Ceil Celu Clip ConvertToTensor Copy Cos Divide
    DivideNoNan Elu Equal Erf Exp Expm1 Floor FloorDivide Gelu Glu
    Greater GreaterEqual HardSigmoid HardSilu HardTanh Identity Isfinite
    Isnan LeakyRelu LeftShift Less LessEqual Log Log1p LogSigmoid
    LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Multiply
    NanToNum Negative NotEqual OnesLike Power ReLU Reciprocal Relu Relu6
    RightShift Round Rsqrt Selu Sigmoid Sign Silu Sin Softplus Softsign
    Sqrt Square StopGradient Subtract Tanh TrueDivide Where ZerosLike""".split()
)
@leaf_rule("Activation", "Dropout")
def elementwise(dims, step):
    for output in step.outputs:
        dims.elementwise(step.inputs, output)


def contraction(dims, step, terms, out):
    """Adds the relations of a product, summed over letters not in the output.

    Args:
        dims: `Dims`.
        step: `Step`.
        terms: List of pairs of a `Value` and the letters of its dims.
        out: String, letters of the output's dims.
    """
    output = step.outputs[0]
    where = collections.defaultdict(list)
    for value, letters in [*terms, (output, out)]:
        for i, letter in enumerate(letters):
            if value.shape[i] > 1:
                where[letter].append((value, i))
    for (first, i), *others in where.values():
        for value, j in others:
            dims.same(first, i, value, j)
    activations = [term for term in terms if not dims.is_weight(term[0])]
    if len(activations) == 2 and len(terms) == 2:
        _attention(dims, activations, out, where)
    for letter, nodes in where.items():
        if letter not in out and activations:
            dims.partial(*nodes[0], output)
        elif letter not in out:
            # The rank of LoRA: the all-reduce would be as large as the kernel.
            dims.keep(*nodes[0], "summed over in a product of weights")
    # If an operand is split along a dim that the other lacks, each device has a
    # partial sum of the other's gradient. (LoRA multiplies two weights.)
    for x, letters in activations or terms:
        for other, other_letters in terms:
            for i, letter in enumerate(other_letters):
                if letter in out and letter not in letters:
                    dims.partial(other, i, x, backward=True)


def _attention(dims, activations, out, where):
    """Keeps all but heads whole, if two activations make scores or values."""
    free = [set(letters) & set(out) for _, letters in activations]
    if not (free[0] - free[1] and free[1] - free[0]):
        return
    for letter in where.keys() - set(out):
        value, i = where[letter][0]
        dims.keep(value, i, IN_ATTENTION)
    for letter in free[0] & free[1]:
        for value, i in where.get(letter, ()):
            dims.head(value, i)
    probable = [v.index in dims.probabilities for v, _ in activations]
    if probable[0] != probable[1]:
        values = probable.index(False)
        for letter in free[values] - free[1 - values]:
            for value, i in where.get(letter, ()):
                dims.keep(value, i, IN_ATTENTION)


@rule("Einsum")
def einsum(dims, step):
    lhs, arrow, out = step.operation.subscripts.replace(" ", "").partition("->")
    if not arrow:
        once = [c for c in lhs if c.isalpha() and lhs.count(c) == 1]
        out = "..." * ("..." in lhs) + "".join(sorted(once))
    operands = values_in(step.args)
    letters = lhs.split(",")
    extra = [
        value.ndim - len(term.replace("...", ""))
        for value, term in zip(operands, letters)
    ]
    most = max([k for k, term in zip(extra, letters) if "..." in term] or [0])
    letters = [
        term.replace("...", _GREEK[most - k : most])
        for k, term in zip(extra, letters)
    ]
    out = out.replace("...", _GREEK[:most])
    contraction(dims, step, list(zip(operands, letters)), out)


@rule("Matmul", "Dot")
def matmul(dims, step):
    a, b = step.inputs
    if a.ndim < 2 or b.ndim < 2:
        return dims.keep_whole([a, b, *step.outputs], "product of vectors")
    if step.kind == "Dot" and b.ndim > 2:
        return dims.keep_whole([a, b, *step.outputs], "dot of many dims")
    most = max(a.ndim, b.ndim) - 2
    batch = _GREEK[:most]
    contraction(
        dims,
        step,
        [
            (a, batch[most - a.ndim + 2 :] + "mk"),
            (b, batch[most - b.ndim + 2 :] + "kn"),
        ],
        batch + "mn",
    )


@rule(
    *"""All Any Argmax Argmin CountNonzero Logsumexp Max Mean Min Moments Norm
    Prod Std Sum Var Variance""".split()
)
def reduction(dims, step):
    x = step.inputs[0]
    op = step.operation
    axis = getattr(op, "axis", getattr(op, "axes", None))
    axes = axes_of(axis, x.ndim)
    keepdims = getattr(step.operation, "keepdims", False)
    for output in step.outputs:
        j = 0
        for i in range(x.ndim):
            if i not in axes:
                dims.same(x, i, output, j)
            elif keepdims:
                dims.keep(x, i, "normalized over this dim")
            elif step.kind in ("Sum", "Mean", "Max", "Min", "All", "Any"):
                dims.partial(x, i, output)
            else:
                dims.keep(x, i, f"{step.kind} over this dim")
            j += keepdims or i not in axes


@rule("Softmax", "LogSoftmax", "Normalize", "TopK")
@leaf_rule("Softmax")
def softmax(dims, step):
    x = step.inputs[0]
    elementwise(dims, step)
    if step.kind == "Softmax":
        dims.probabilities.update(value.index for value in step.outputs)
    for i in axes_of(getattr(step.operation, "axis", -1), x.ndim):
        dims.keep(x, i, f"{step.kind} over this dim")


@rule("OneHot")
def one_hot(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    k = step.operation.axis % output.ndim
    for i in range(x.ndim):
        dims.same(x, i, output, i + (i >= k))


@rule("Cumsum", "Cumprod", "Flip", "Sort", "Argsort", "Roll")
def along_an_axis(dims, step):
    x = step.inputs[0]
    elementwise(dims, step)
    for i in axes_of(getattr(step.operation, "axis", None), x.ndim):
        dims.keep(x, i, f"{step.kind} along this dim")
