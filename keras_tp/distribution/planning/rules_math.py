"""Rules for elementwise operations, contractions and reductions."""

import collections
import string

from keras_tp.distribution.planning.graph import values_in
from keras_tp.distribution.planning.rules import leaf_rule
from keras_tp.distribution.planning.rules import rule

_GREEK = "αβγδεζηθ"
# One reason for all forms of attention, because backends use different forms.
IN_ATTENTION = "inside an attention head, or a position"
# Reductions of which each device computes its part.
_SUMS = ("Sum", "Nansum", "Mean", "Average", "Max", "Amax", "Min", "Amin")
_SUMS += ("All", "Any")


def axes_of(axis, ndim):
    """Returns the list of dims that an `axis` argument names."""
    if axis is None:
        return list(range(ndim))
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return [i % ndim for i in axes]


@rule(
    *"""Abs Absolute Add Angle Arccos Arccosh Arcsin Arcsinh Arctan Arctan2
    Arctanh Array BinaryCrossentropy BitwiseAnd BitwiseInvert
    BitwiseLeftShift BitwiseNot BitwiseOr BitwiseRightShift BitwiseXor
    BroadcastTo Cast Cbrt Ceil Celu Clip Conj Conjugate ConvertToTensor
    Copy Cos Cosh Deg2rad Divide DivideNoNan Elu EmptyLike Equal Erf Erfc
    Erfinv Exp Exp2 Expm1 Fabs Floor FloorDivide Fmax Fmin Fmod FullLike
    Gcd Gelu Greater GreaterEqual HardShrink HardSigmoid HardSilu HardTanh
    Heaviside Hypot I0 Identity Imag Isclose Isfinite Isinf Isnan Isneginf
    Isposinf Isreal Lcm Ldexp LeakyRelu LeftShift Less LessEqual Log Log10
    Log1p Log2 LogSigmoid Logaddexp Logaddexp2 LogicalAnd LogicalNot
    LogicalOr LogicalXor Maximum Minimum Mod Multiply NanToNum Negative
    Nextafter NotEqual OnesLike Polar Power Rad2deg ReLU Real Reciprocal
    Relu Relu6 RightShift Round Rsqrt SaturateCast Select Selu Sigmoid
    Sign Signbit Silu Sin Sinc Sinh SoftShrink Softplus Softsign
    SparsePlus SparseSigmoid Sqrt Square Squareplus StopGradient Subtract
    Tan Tanh TanhShrink Threshold TrueDivide Trunc UnravelIndex Where
    ZerosLike""".split()
)
@leaf_rule("Activation", "Dropout")
def elementwise(dims, step):
    for output in step.outputs:
        ranks = [x.ndim for x in step.inputs]
        if output.ndim < max(ranks, default=0) or any(
            output.shape[output.ndim - x.ndim + i] < size
            for x in step.inputs
            for i, size in enumerate(x.shape)
        ):
            # Keras's symbolic shape is wrong: `bitwise_and` does not broadcast.
            why = f"{step.kind} of shapes that are broadcast"
            return dims.keep_whole([*step.inputs, output], why)
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
    # If an operand is split along a dim that the other lacks, or broadcasts,
    # each device has a partial sum of the other's gradient. (LoRA multiplies
    # two weights.)
    for x, letters in activations or terms:
        size_of = dict(zip(letters, x.shape))
        for other, other_letters in terms:
            for i, letter in enumerate(other_letters):
                if letter in out and size_of.get(letter, 1) == 1:
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
    *"""All Amax Amin Any Argmax Argmin Average CountNonzero Logsumexp Max Mean
    Median Min Moments Nanargmax Nanargmin Nanmax Nanmean Nanmedian Nanmin
    Nanpercentile Nanprod Nanquantile Nanstd Nansum Nanvar Norm Percentile Prod
    Ptp Quantile Std Sum Trapezoid Var Variance""".split()
)
def reduction(dims, step):
    x = step.inputs[0]
    op = step.operation
    axis = getattr(op, "axis", getattr(op, "axes", None))
    axes = axes_of(axis, x.ndim)
    keepdims = getattr(step.operation, "keepdims", False)
    for other in step.inputs[1:]:
        if other.shape == x.shape:
            dims.elementwise([other], x)
        else:
            dims.keep_whole([x, other], f"{step.kind} takes all of it")
    is_sum = step.kind in _SUMS and len(step.inputs) == 1
    for output in step.outputs:
        # Several quantiles are stacked in front.
        j = output.ndim - (x.ndim if keepdims else x.ndim - len(axes))
        for k in range(j):
            dims.keep(output, k, f"{step.kind} stacks its results")
        for i in range(x.ndim):
            if i not in axes:
                dims.same(x, i, output, j)
            elif keepdims:
                dims.keep(x, i, "normalized over this dim")
            elif is_sum:
                dims.partial(x, i, output)
            else:
                dims.keep(x, i, f"{step.kind} over this dim")
            j += keepdims or i not in axes


@rule("Softmax", "LogSoftmax", "Normalize", "Sparsemax", "TopK")
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


@rule(
    *"""Argpartition Argsort Cross Cumprod Cumsum Diff Flip Fliplr Flipud
    HSVToRGB Nancumprod Nancumsum RGBToGrayscale RGBToHSV Roll Rot90 Sort Tril
    Triu""".split()
)
def along_an_axis(dims, step):
    """Splits all dims but those along which elements depend on each other."""
    axes = _axes_in_use(step)
    for output in step.outputs:
        for x in step.inputs:
            if x.ndim != output.ndim:
                dims.keep_whole([x, output], f"{step.kind} of unlike ranks")
                continue
            dims.elementwise([x], output)
            for i in axes_of(axes, x.ndim):
                dims.keep(x, i, f"{step.kind} along this dim")
                dims.keep(output, i, f"{step.kind} along this dim")


def _axes_in_use(step):
    op = step.operation
    if step.kind in ("Tril", "Triu"):
        return [-2, -1]
    if step.kind in ("Fliplr", "Flipud"):
        return [1 if step.kind == "Fliplr" else 0]
    if step.kind == "Rot90":
        return list(op.axes)
    if step.kind == "Cross":
        return [op.axisa, op.axisb, op.axisc]
    if getattr(op, "data_format", None) == "channels_first":
        return [-3]
    is_color = step.kind in ("HSVToRGB", "RGBToGrayscale", "RGBToHSV")
    return [-1] if is_color else getattr(op, "axis", None)


@rule("CategoricalCrossentropy", "SparseCategoricalCrossentropy", "InTopK")
def over_classes(dims, step):
    """Splits all dims but that of the classes."""
    *_, scores = sorted(step.inputs, key=lambda x: x.ndim)
    axis = getattr(step.operation, "axis", -1) % scores.ndim
    for x in (*step.inputs, *step.outputs):
        for i in range(scores.ndim):
            if x.ndim == scores.ndim and i != axis:
                dims.same(scores, i, x, i)
            elif x.ndim == scores.ndim:
                dims.keep(x, i, f"{step.kind} over this dim")
            elif i != axis:
                dims.same(scores, i, x, i - (i > axis))


@rule("Tensordot", "Inner", "Outer", "Vdot")
def product(dims, step):
    """A contraction of two tensors over a list of pairs of dims."""
    a, b, output = *step.inputs, step.outputs[0]
    axes = getattr(step.operation, "axes", None)
    if step.kind in ("Outer", "Vdot") and (a.ndim > 1 or b.ndim > 1):
        whole = f"{step.kind} of tensors that are flattened"
        return dims.keep_whole([a, b, output], whole)
    if step.kind == "Outer":
        pairs = []
    elif step.kind in ("Inner", "Vdot"):
        pairs = [(a.ndim - 1, b.ndim - 1)]
    elif isinstance(axes, int):
        pairs = [(a.ndim - axes + k, k) for k in range(axes)]
    else:
        pairs = zip(axes_of(axes[0], a.ndim), axes_of(axes[1], b.ndim))
    letters_a = string.ascii_lowercase[: a.ndim]
    letters_b = list(string.ascii_uppercase[: b.ndim])
    for i, j in pairs:
        letters_b[j] = letters_a[i]
    summed = set(letters_a) & set(letters_b)
    out = [c for c in (*letters_a, *letters_b) if c not in summed]
    terms = [(a, letters_a), (b, "".join(letters_b))]
    contraction(dims, step, terms, "".join(out))


# Operation -> number of its last dims that it takes as one matrix or signal.
_LAST_DIMS = {
    **dict.fromkeys(
        """Cholesky CholeskyInverse Det Eig Eigh Inv Logdet Lstsq LuFactor
        MatrixRank Pinv Qr SVD Solve SolveTriangular CDist CTCDecode FFT2 IFFT2
        """.split(),
        2,
    ),
    **dict.fromkeys(
        """CTCLoss ExtractSequences FFT IRFFT RFFT STFT MultiHot Vander
        ViewAsComplex ViewAsReal View""".split(),
        1,
    ),
    **dict.fromkeys(["ISTFT"], 2),
    **dict.fromkeys(
        """AffineTransform CropImages DepthToSpace ElasticTransform
        ExtractPatches GaussianBlur PadImages PerspectiveTransform
        ScaleAndTranslate SobelEdges SpaceToDepth Unfold""".split(),
        3,
    ),
    "Fold": 2,
}


@rule(*_LAST_DIMS)
def matrices(dims, step):
    """Splits batch dims only: each matrix, signal or image is computed whole.

    Example: `Solve` of shapes `(8, 3, 3)` and `(8, 3, 2)` is split along the
    first dim.
    """
    x = step.inputs[0]
    last = _LAST_DIMS[step.kind] + getattr(step.operation, "is_3d", False)
    batch_dims = max(x.ndim - last, 0)
    for value in (*step.inputs, *step.outputs):
        for i in range(value.ndim):
            if i < batch_dims and value.ndim >= batch_dims:
                dims.same(x, i, value, i)
            else:
                dims.keep(value, i, f"{step.kind} takes all of it")


@rule(
    *"""AllClose Bincount Corrcoef Correlate Diagflat Histogram Kron
    MapCoordinates Meshgrid Nonzero PSNR SSIM Unique Scatter ScatterUpdate
    Slogdet""".split()
)
def all_of_it(dims, step):
    why = f"{step.kind} takes all of it"
    dims.keep_whole([*step.inputs, *step.outputs], why)


@rule("Digitize", "IsIn", "SearchSorted")
def looked_up(dims, step):
    """Splits the values that are looked up; the sorted ones are whole."""
    x, *others = step.inputs
    if step.kind == "SearchSorted":
        others, x = [x], others[0]
    dims.elementwise([x], step.outputs[0])
    dims.keep_whole(others, f"{step.kind} takes all of it")


@rule(
    "SegmentMax", "SegmentMin", "SegmentProd", "SegmentReduction", "SegmentSum"
)
def segments(dims, step):
    data, ids, output = *step.inputs[:2], step.outputs[0]
    for i in range(1, data.ndim):
        dims.same(data, i, output, i)
    for value in (data, ids, output):
        dims.keep(value, 0, f"{step.kind} over this dim")


@rule("Arange", "Full", "Geomspace", "Linspace", "Logspace")
def from_numbers(dims, step):
    dims.keep_whole(step.inputs, f"{step.kind} takes all of it")


@rule("Size")
def shape_alone(dims, step):
    """Relates no dims: the values of the input are not read."""
