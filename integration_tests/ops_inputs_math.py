"""Inputs of functions that compute: products, layers' functions, images."""

import keras
import numpy as np
from keras import ops

from integration_tests.ops_inputs import BATCH
from integration_tests.ops_inputs import IDS
from integration_tests.ops_inputs import IMAGES
from integration_tests.ops_inputs import MATRIX
from integration_tests.ops_inputs import RGB
from integration_tests.ops_inputs import VECTOR
from integration_tests.ops_inputs import X3
from integration_tests.ops_inputs import X
from integration_tests.ops_inputs import between
from integration_tests.ops_inputs import integers
from integration_tests.ops_inputs import numbers
from integration_tests.ops_inputs import positive_definite


def _sum_of(f):
    """Decompositions are unique up to signs: what is compared is not."""
    return lambda x: [ops.abs(y) for y in f(x)]


def _doubled(x):
    @ops.custom_gradient
    def double(x):
        def gradient(*args, upstream=None):
            dy = args[0] if args else upstream
            return dy * 5

        return x * 2, gradient

    return double(x)


INPUTS = {
    "adaptive_average_pool": (
        lambda x: ops.adaptive_average_pool(x, (4, 3)),
        [IMAGES],
    ),
    "adaptive_max_pool": (
        lambda x: ops.adaptive_max_pool(x, (4, 3)),
        [IMAGES],
    ),
    "associative_scan": (
        lambda x: ops.associative_scan(ops.add, x, axis=1),
        [X],
    ),
    "average": [
        ("all", ops.average, [X]),
        ("weights", lambda x, w: ops.average(x, 1, w), [X, np.abs(X)]),
    ],
    "average_pool": (lambda x: ops.average_pool(x, 2, 1), [IMAGES]),
    "batch_normalization": (
        lambda x, m, v, b, g: ops.batch_normalization(x, m, v, -1, b, g),
        [X, VECTOR, np.abs(VECTOR), VECTOR + 1, VECTOR - 2],
    ),
    "binary_crossentropy": [
        (
            "",
            ops.binary_crossentropy,
            [between(0, 1, 4, 6), between(0.1, 0.9, 4, 6, seed=1)],
        ),
        (
            "logits",
            lambda t, x: ops.binary_crossentropy(t, x, from_logits=True),
            [between(0, 1, 4, 6), X],
        ),
    ],
    "categorical_crossentropy": [
        (
            "",
            ops.categorical_crossentropy,
            [between(0, 1, 4, 6), between(0.1, 0.9, 4, 6, seed=1)],
        ),
        (
            "logits",
            lambda t, x: ops.categorical_crossentropy(t, x, from_logits=True),
            [between(0, 1, 4, 6), X],
        ),
    ],
    "cdist": (ops.cdist, [X, numbers(2, 6)]),
    "cholesky": (ops.cholesky, [positive_definite(4)]),
    "cholesky_inverse": (ops.cholesky_inverse, [positive_definite(4)]),
    "cond": (
        lambda x: ops.cond(ops.sum(x) > 0, lambda: x * 2, lambda: x * 3),
        [X],
    ),
    "conv": [
        ("", ops.conv, [IMAGES, numbers(3, 3, 4, 2)]),
        (
            "strides",
            lambda x, w: ops.conv(x, w, 2, "same"),
            [IMAGES, numbers(2, 2, 4, 6)],
        ),
        (
            "dilated",
            lambda x, w: ops.conv(x, w, 1, "same", dilation_rate=2),
            [numbers(2, 8, 4), numbers(2, 4, 6)],
        ),
    ],
    "conv_transpose": (
        lambda x, w: ops.conv_transpose(x, w, 2),
        [IMAGES, numbers(3, 3, 2, 4)],
    ),
    "corrcoef": (ops.corrcoef, [X]),
    "correlate": [
        (
            mode,
            lambda x, y, m=mode: ops.correlate(x, y, m),
            [numbers(8), VECTOR[:4]],
        )
        for mode in ("valid", "same", "full")
    ],
    "cross": [
        ("3", ops.cross, [numbers(4, 3), numbers(4, 3, seed=1)]),
        ("2", ops.cross, [numbers(4, 2), numbers(4, 2, seed=1)]),
    ],
    "ctc_decode": (
        lambda x: ops.ctc_decode(x, np.array([6, 5, 4, 6], "int32"))[1],
        [numbers(4, 6, 8)],
    ),
    "ctc_loss": (
        lambda x: ops.ctc_loss(
            np.array([[1, 2]] * 4, "int32"),
            x,
            np.array([2, 1, 2, 1], "int32"),
            np.array([6, 5, 4, 6], "int32"),
        ),
        [numbers(4, 6, 8)],
    ),
    "custom_gradient": (lambda x: _doubled(x), [X]),
    "depth_to_space": (lambda x: ops.depth_to_space(x, 2), [IMAGES]),
    "depthwise_conv": (
        ops.depthwise_conv,
        [IMAGES, numbers(3, 3, 4, 2)],
    ),
    "det": (ops.det, [BATCH]),
    "diff": [
        ("", ops.diff, [X]),
        ("axis 0", lambda x: ops.diff(x, 2, axis=0), [X]),
    ],
    "dot": [
        ("", ops.dot, [X, numbers(6, 2)]),
        ("vector", ops.dot, [X, VECTOR]),
        ("ranks", ops.dot, [X3, numbers(2, 8, 4)]),
    ],
    "dot_product_attention": [
        (
            label,
            lambda q, k, v, a=arguments: ops.dot_product_attention(
                q, k, v, **a
            ),
            [numbers(2, 4, 2, 6, seed=s) for s in range(3)],
        )
        for label, arguments in (
            ("", {}),
            ("causal", {"is_causal": True}),
        )
    ],
    "eig": (lambda x: ops.sort(ops.real(ops.eig(x)[0])), [MATRIX]),
    "eigh": (lambda x: ops.eigh(x)[0], [positive_definite(4)]),
    "einsum": [
        (
            equation,
            lambda *xs, e=equation: ops.einsum(e, *xs),
            [numbers(*shape, seed=i) for i, shape in enumerate(shapes)],
        )
        for equation, shapes in {
            "ab,bc->ac": ((4, 6), (6, 2)),
            "abc,abd->cd": ((4, 2, 6), (4, 2, 8)),
            "abc,cde->abde": ((2, 4, 6), (6, 2, 4)),
            "abc->ca": ((2, 4, 6),),
            "...a,ab->...b": ((2, 4, 6), (6, 8)),
        }.items()
    ],
    "extract_sequences": (
        lambda x: ops.extract_sequences(x, 4, 2),
        [numbers(4, 16)],
    ),
    "fft": (lambda x, y: ops.fft((x, y)), [X, numbers(4, 6, seed=1)]),
    "fft2": (lambda x, y: ops.fft2((x, y)), [X, numbers(4, 6, seed=1)]),
    "ifft2": (lambda x, y: ops.ifft2((x, y)), [X, numbers(4, 6, seed=1)]),
    "fori_loop": (
        lambda x: ops.fori_loop(0, 3, lambda i, s: s * 0.5 + x, x),
        [X],
    ),
    "gelu": [
        (str(how), lambda x, h=how: ops.gelu(x, approximate=h), [X])
        for how in (True, False)
    ],
    "image.affine_transform": (
        lambda x: ops.image.affine_transform(
            x, np.array([[1.1, 0.1, 0, 0, 0.9, 0.2, 0, 0]] * 2, "float32")
        ),
        [IMAGES],
    ),
    "image.crop_images": (
        lambda x: ops.image.crop_images(
            x, 1, 2, target_height=4, target_width=2
        ),
        [IMAGES],
    ),
    "image.elastic_transform": (
        lambda x: ops.image.elastic_transform(x, 2.0, 1.0, seed=3),
        [IMAGES],
    ),
    "image.extract_patches": (
        lambda x: ops.image.extract_patches(x, 2),
        [IMAGES],
    ),
    "image.extract_patches_3d": (
        lambda x: ops.image.extract_patches_3d(x, 2),
        [numbers(2, 4, 4, 6, 2)],
    ),
    "image.gaussian_blur": (ops.image.gaussian_blur, [IMAGES]),
    "image.hsv_to_rgb": (ops.image.hsv_to_rgb, [RGB]),
    "image.rgb_to_hsv": (ops.image.rgb_to_hsv, [RGB]),
    "image.rgb_to_grayscale": (ops.image.rgb_to_grayscale, [RGB]),
    "image.map_coordinates": (
        lambda x: ops.image.map_coordinates(
            x, between(0.2, 2.8, 2, 4, 6, seed=3), 1
        ),
        [X],
    ),
    "image.pad_images": (
        lambda x: ops.image.pad_images(
            x, 1, 2, target_height=10, target_width=10
        ),
        [IMAGES],
    ),
    "image.perspective_transform": (
        lambda x: ops.image.perspective_transform(
            x,
            np.array([[[0, 0], [0, 5], [7, 0], [7, 5]]] * 2, "float32"),
            np.array([[[0, 1], [0, 5], [7, 0], [6, 5]]] * 2, "float32"),
        ),
        [IMAGES],
    ),
    "image.resize": [
        (
            how,
            lambda x, h=how: ops.image.resize(x, (4, 10), h),
            [IMAGES],
        )
        for how in ("bilinear", "nearest")
    ],
    "image.scale_and_translate": (
        lambda x: ops.image.scale_and_translate(
            x,
            (2, 10, 6, 4),
            np.array([1.2, 0.9], "float32"),
            np.array([0.4, 0.2], "float32"),
            (1, 2),
            "linear",
        ),
        [IMAGES],
    ),
    "image.sobel_edges": (ops.image.sobel_edges, [IMAGES]),
    "image.ssim": (
        lambda x, y: ops.image.ssim(x, y, filter_size=4),
        [IMAGES, IMAGES[:, ::-1] * 0.9],
    ),
    "inner": (ops.inner, [X, numbers(2, 6)]),
    "inv": (ops.inv, [BATCH]),
    "irfft": (
        lambda x, y: ops.irfft((x, y)),
        [numbers(4, 6), numbers(4, 6, seed=1)],
    ),
    "istft": (
        lambda x: ops.istft(ops.stft(x, 8, 4, 8), 8, 4, 8),
        [numbers(4, 32)],
    ),
    "jvp": (
        lambda x, t: ops.jvp(ops.sin, (x,), (t,)),
        [X, numbers(4, 6, seed=1)],
    ),
    "layer_normalization": (
        lambda x, g, b: ops.layer_normalization(x, g, b),
        [X, VECTOR, VECTOR + 2],
    ),
    "ldexp": (ops.ldexp, [X, integers(-2, 3, 4, 6)]),
    "leaky_relu": (ops.leaky_relu, [X]),
    "logdet": (ops.logdet, [positive_definite(4)]),
    "slogdet": (ops.slogdet, [BATCH]),
    "lstsq": (ops.lstsq, [MATRIX, numbers(4, 2)]),
    "lu_factor": (ops.lu_factor, [BATCH]),
    "map": (lambda x: ops.map(lambda row: ops.sum(row) * row, x), [X]),
    "matmul": [
        ("", ops.matmul, [X, numbers(6, 2)]),
        ("batch", ops.matmul, [X3, numbers(4, 8, 2)]),
        ("broadcast", ops.matmul, [X3, numbers(8, 2)]),
        ("vector", ops.matmul, [X3, numbers(8)]),
    ],
    "matrix_rank": (ops.matrix_rank, [BATCH]),
    "max_pool": [
        ("", lambda x: ops.max_pool(x, 2, 2), [IMAGES]),
        ("same", lambda x: ops.max_pool(x, 3, 2, "same"), [IMAGES]),
        ("overlapping", lambda x: ops.max_pool(x, 3, 1, "same"), [IMAGES]),
    ],
    "moments": [
        (str(axes), lambda x, a=axes: ops.moments(x, a, keepdims=True), [X3])
        for axes in ((0,), (1, 2), (0, 1, 2))
    ],
    "nan_to_num": (ops.nan_to_num, [X]),
    "nextafter": (ops.nextafter, [X, numbers(4, 6, seed=1)]),
    "norm": [
        ("all", ops.norm, [X]),
        ("axis 1", lambda x: ops.norm(x, axis=1), [X]),
        ("ord 1", lambda x: ops.norm(x, ord=1, axis=0), [X]),
        ("inf", lambda x: ops.norm(x, ord=np.inf, axis=1), [X]),
        ("nuc", lambda x: ops.norm(x, ord="nuc"), [X]),
        ("two", lambda x: ops.norm(x, ord=1, axis=(0, 1)), [X3]),
    ],
    "normalize": [
        (f"axis {axis}", lambda x, a=axis: ops.normalize(x, a), [X])
        for axis in (0, 1)
    ],
    "pinv": (ops.pinv, [X]),
    "polar": (ops.polar, [np.abs(X), numbers(4, 6, seed=1)]),
    "psnr": (
        lambda x, y: ops.psnr(x, y, 2.0),
        [X, numbers(4, 6, seed=1)],
    ),
    "qr": (_sum_of(ops.qr), [X]),
    **{
        name: [
            (label, lambda x, f=name, q=q, a=a: getattr(ops, f)(x, q, a), [X3])
            for label, a in (("all", None), ("axis 1", 1))
        ]
        for name, q in {
            "nanpercentile": 30,
            "nanquantile": 0.3,
            "percentile": 30,
            "quantile": 0.3,
        }.items()
    },
    "random.beta": (
        lambda a, b: keras.random.beta((4, 6), a, b, seed=3),
        [between(0.5, 2, 4, 6), between(0.5, 2, 4, 6, seed=1)],
    ),
    "random.binomial": (
        lambda c, p: keras.random.binomial((4, 6), c, p, seed=3),
        [between(4, 9, 4, 6).round(), between(0.2, 0.8, 4, 6)],
    ),
    "random.categorical": (
        lambda x: keras.random.categorical(x, 3, seed=3),
        [X],
    ),
    "random.dropout": (
        lambda x: keras.random.dropout(x, 0.4, seed=3),
        [X],
    ),
    "random.gamma": (
        lambda a: keras.random.gamma((4, 6), a, seed=3),
        [between(0.5, 2, 4, 6)],
    ),
    "random.shuffle": [
        (
            f"axis {axis}",
            lambda x, a=axis: keras.random.shuffle(x, a, seed=3),
            [X],
        )
        for axis in (0, 1)
    ],
    "rms_normalization": (
        lambda x, s: ops.rms_normalization(x, s),
        [X, VECTOR],
    ),
    "round": (lambda x: ops.round(x, 1), [X]),
    "scan": (
        lambda x: ops.scan(
            lambda carry, row: (carry + row, carry * row), ops.zeros(6), x
        ),
        [X],
    ),
    "separable_conv": (
        lambda x, d, p: ops.separable_conv(x, d, p),
        [IMAGES, numbers(3, 3, 4, 2), numbers(1, 1, 8, 6)],
    ),
    "solve": (ops.solve, [BATCH, numbers(2, 4, 2)]),
    "solve_triangular": (
        lambda a, b: ops.solve_triangular(a, b, lower=True),
        [np.tril(BATCH), numbers(2, 4, 2)],
    ),
    "space_to_depth": (lambda x: ops.space_to_depth(x, 2), [IMAGES]),
    "sparse_categorical_crossentropy": [
        (
            str(logits),
            lambda t, x, f=logits: ops.sparse_categorical_crossentropy(
                t, x, from_logits=f
            ),
            [IDS, between(0.1, 0.9, 4, 6)],
        )
        for logits in (True, False)
    ],
    "squareplus": (ops.squareplus, [X]),
    "stft": (lambda x: ops.stft(x, 8, 4, 8), [numbers(4, 32)]),
    "stop_gradient": (lambda x: ops.stop_gradient(x) * x, [X]),
    "svd": (_sum_of(ops.svd), [X]),
    "switch": (
        lambda x: ops.switch(1, [lambda y: y, lambda y: y * 3], x),
        [X],
    ),
    "tensordot": [
        ("1", lambda x, y: ops.tensordot(x, y, 1), [X, numbers(6, 2)]),
        (
            "2",
            lambda x, y: ops.tensordot(x, y, [[0, 2], [1, 0]]),
            [X3, numbers(8, 4, 2)],
        ),
    ],
    "threshold": (lambda x: ops.threshold(x, 0.5, 2.0), [X]),
    "trapezoid": [
        ("", ops.trapezoid, [X]),
        ("x", ops.trapezoid, [X, np.sort(numbers(4, 6, seed=1))]),
    ],
    "vander": (ops.vander, [VECTOR]),
    "vdot": (ops.vdot, [X, numbers(4, 6, seed=1)]),
    "vectorize": (
        lambda x: ops.vectorize(
            lambda row: row * ops.sum(row), signature="(d)->(d)"
        )(x),
        [X],
    ),
    "vectorized_map": (
        lambda x: ops.vectorized_map(lambda row: row * ops.sum(row), x),
        [X],
    ),
    "view_as_complex": (ops.view_as_complex, [numbers(4, 6, 2)]),
    "view_as_real": (
        lambda x, y: ops.view_as_real(ops.polar(x, y)),
        [np.abs(X), numbers(4, 6, seed=1)],
    ),
    "while_loop": (
        lambda x: ops.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5 + x), (0, x)
        )[1],
        [X],
    ),
    "heaviside": (ops.heaviside, [X, numbers(4, 6, seed=1)]),
    "allclose": (ops.allclose, [X, X + (X > 1.5)]),
    "isclose": (ops.isclose, [X, X + (X > 1)]),
}
