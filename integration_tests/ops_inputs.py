"""Arrays that functions of `keras.ops` are given, and what those take."""

import numpy as np


def numbers(*shape, low=0.3, high=1.6, seed=0):
    """Returns numbers of both signs, none near 0, no two alike."""
    rng = np.random.default_rng([seed, *shape])
    values = rng.uniform(low, high, shape) * rng.choice([-1, 1], shape)
    return values.astype("float32")


def between(low, high, *shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.uniform(low, high, shape).astype("float32")


def integers(low, high, *shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(low, high, shape).astype("int32")


def matrices(*shape):
    """Returns matrices that are far from singular."""
    return numbers(*shape) + 3 * np.eye(shape[-1], dtype="float32")


def positive_definite(size):
    x = numbers(size, size)
    return x @ x.T / size + 2 * np.eye(size, dtype="float32")


def _positive(x):
    return np.abs(x) + 0.2


def _inside(x):
    return x / 2


def _int(x):
    return np.round(np.abs(x) * 7).astype("int32")


def _truth(x):
    return x > 0


# What a function is defined for, made from numbers of both signs.
DOMAINS = {
    **dict.fromkeys(
        ("log", "log10", "log2", "log1p", "sqrt", "rsqrt", "i0"), _positive
    ),
    "arccosh": lambda x: np.abs(x) + 1.2,
    **dict.fromkeys(("arccos", "arcsin", "arctanh", "erfinv"), _inside),
    **dict.fromkeys(("nanprod", "prod", "cumprod"), _positive),
    "power": _positive,
    **dict.fromkeys(
        (
            "bitwise_and",
            "bitwise_invert",
            "bitwise_left_shift",
            "bitwise_not",
            "bitwise_or",
            "bitwise_right_shift",
            "bitwise_xor",
            "gcd",
            "lcm",
            "left_shift",
            "right_shift",
        ),
        _int,
    ),
    **dict.fromkeys(
        (
            "all",
            "any",
            "logical_and",
            "logical_not",
            "logical_or",
            "logical_xor",
        ),
        _truth,
    ),
}

# Reductions over one axis.
ONE_AXIS = ("argmax", "argmin", "nanargmax", "nanargmin")

# Their result has a shape, or is a number, that follows from values.
EAGER = (
    "allclose",
    "convert_to_numpy",
    "nonzero",
    "unique",
    "matrix_rank",
)

# Public names that compute nothing from a tensor that has dims.
NO_TENSORS = {
    "makes a tensor of a shape or of numbers": (
        "arange",
        "bartlett",
        "blackman",
        "empty",
        "eye",
        "full",
        "geomspace",
        "hamming",
        "hanning",
        "identity",
        "kaiser",
        "linspace",
        "logspace",
        "ones",
        "tri",
        "zeros",
        "random.normal",
        "random.randint",
        "random.truncated_normal",
        "random.uniform",
    ),
    "is a class that holds a seed": ("random.SeedGenerator",),
    "looks at a tensor without its values": (
        "dtype",
        "is_tensor",
        "ndim",
        "shape",
        "size",
    ),
    "gives values that mean nothing": ("empty_like",),
}

X = numbers(4, 6)
X3 = numbers(4, 6, 8)
IMAGES = between(0.1, 0.9, 2, 8, 6, 4)
RGB = between(0.1, 0.9, 2, 8, 6, 3)
VECTOR = numbers(6)
MATRIX = matrices(4, 4)
BATCH = matrices(2, 4, 4)
IDS = np.array([0, 2, 1, 0], "int32")
