"""Inputs of functions that build, move or look up what arrays hold."""

import numpy as np
from keras import ops

from integration_tests.ops_inputs import IDS
from integration_tests.ops_inputs import MATRIX
from integration_tests.ops_inputs import VECTOR
from integration_tests.ops_inputs import X3
from integration_tests.ops_inputs import X
from integration_tests.ops_inputs import between
from integration_tests.ops_inputs import integers
from integration_tests.ops_inputs import numbers

INPUTS = {
    "append": [
        ("flat", ops.append, [X, numbers(2, 6)]),
        ("axis 0", lambda x, y: ops.append(x, y, 0), [X, numbers(2, 6)]),
        ("axis 1", lambda x, y: ops.append(x, y, 1), [X, numbers(4, 2)]),
    ],
    "argpartition": (
        # The order within the parts is not given.
        lambda x: ops.sort(ops.argpartition(x, 2, axis=1)[:, :2], axis=1),
        [X],
    ),
    "array": (ops.array, [X]),
    "array_split": [
        ("axis 0", lambda x: ops.array_split(x, 2), [X]),
        ("axis 1", lambda x: ops.array_split(x, 4, axis=1), [X]),
    ],
    "bincount": [
        (
            "",
            lambda x: ops.bincount(x, minlength=6),
            [integers(0, 6, 8)],
        ),
        (
            "weights",
            lambda x, w: ops.bincount(x, weights=w, minlength=6),
            [integers(0, 6, 8), between(0.5, 1, 8)],
        ),
        (
            "rows",
            lambda x: ops.bincount(x, minlength=6),
            [integers(0, 6, 4, 8)],
        ),
    ],
    "broadcast_to": (lambda x: ops.broadcast_to(x, (2, 4, 6)), [X]),
    "cast": (lambda x: ops.cast(x, "int32"), [X * 5]),
    "clip": (lambda x: ops.clip(x, -1.0, 0.9), [X]),
    "concatenate": [
        ("axis 0", lambda x, y: ops.concatenate([x, y]), [X, numbers(2, 6)]),
        (
            "axis 1",
            lambda x, y: ops.concatenate([x, y], 1),
            [X, numbers(4, 2)],
        ),
    ],
    "convert_to_numpy": (ops.convert_to_numpy, [X]),
    "convert_to_tensor": (ops.convert_to_tensor, [X]),
    "diag": [
        ("vector", ops.diag, [VECTOR]),
        ("offset", lambda x: ops.diag(x, 1), [VECTOR]),
        ("matrix", ops.diag, [MATRIX]),
    ],
    "diagflat": (ops.diagflat, [VECTOR]),
    "diagonal": [
        ("", ops.diagonal, [X]),
        ("offset", lambda x: ops.diagonal(x, 1), [X]),
        ("axes", lambda x: ops.diagonal(x, 0, 1, 2), [X3]),
    ],
    "digitize": (
        lambda x: ops.digitize(x, np.array([-1.0, 0.0, 1.0], "float32")),
        [X],
    ),
    "dsplit": (lambda x: ops.dsplit(x, 2), [X3]),
    "expand_dims": [
        (f"axis {axis}", lambda x, a=axis: ops.expand_dims(x, a), [X])
        for axis in (0, 1, -1)
    ],
    "flip": [
        (f"axis {axis}", lambda x, a=axis: ops.flip(x, a), [X])
        for axis in (None, 0, 1)
    ],
    "fold": (
        lambda x: ops.fold(x, (4, 6), 2, stride=2),
        [numbers(2, 8, 6)],
    ),
    "full_like": (lambda x: ops.full_like(x, 3), [X]),
    "get_item": [
        ("row", lambda x: ops.get_item(x, 1), [X]),
        ("rows", lambda x: ops.get_item(x, slice(1, 3)), [X]),
        ("column", lambda x: ops.get_item(x, (slice(None), 2)), [X]),
        ("step", lambda x: ops.get_item(x, (..., slice(0, 6, 2))), [X]),
        ("new", lambda x: ops.get_item(x, (slice(None), None)), [X]),
    ],
    "histogram": (
        lambda x: ops.histogram(x, 4, range=(-2, 2)),
        [numbers(8)],
    ),
    "in_top_k": (
        lambda t, x: ops.in_top_k(t, x, 2),
        [IDS, X],
    ),
    "isin": (
        ops.isin,
        [integers(0, 9, 4, 6), integers(0, 9, 4)],
    ),
    "kron": (ops.kron, [X, numbers(2, 4)]),
    "meshgrid": (ops.meshgrid, [VECTOR, numbers(4)]),
    "moveaxis": (lambda x: ops.moveaxis(x, 0, 2), [X3]),
    "multi_hot": (
        lambda x: ops.multi_hot(x, 8),
        [integers(0, 8, 4, 6)],
    ),
    "nonzero": (ops.nonzero, [X * (X > 0)]),
    "one_hot": [
        (
            f"axis {axis}",
            lambda x, a=axis: ops.one_hot(x, 8, a),
            [integers(0, 8, 4, 6)],
        )
        for axis in (-1, 0)
    ],
    "outer": (ops.outer, [VECTOR, numbers(4)]),
    "pad": [
        ("constant", lambda x: ops.pad(x, ((1, 0), (2, 1))), [X]),
        *(
            (mode, lambda x, m=mode: ops.pad(x, ((1, 1), (2, 0)), m), [X])
            for mode in ("reflect", "symmetric")
        ),
    ],
    "rearrange": (
        lambda x: ops.rearrange(x, "a b (c d) -> b (a d) c", c=2),
        [X3],
    ),
    "repeat": [
        (f"axis {axis}", lambda x, a=axis: ops.repeat(x, 2, a), [X])
        for axis in (None, 0, 1)
    ],
    "reshape": [
        (str(shape), lambda x, s=shape: ops.reshape(x, s), [X3])
        for shape in ((24, 8), (4, 48), (-1,), (4, 6, 2, 4), (2, 2, 48))
    ],
    "roll": [
        (f"axis {axis}", lambda x, a=axis: ops.roll(x, 3, a), [X])
        for axis in (None, 0, 1)
    ],
    "rot90": (ops.rot90, [X]),
    "saturate_cast": (lambda x: ops.saturate_cast(x, "int8"), [X * 90]),
    "scatter": (
        lambda i, x: ops.scatter(i, x, (8, 6)),
        [np.array([[0], [3], [5], [3]], "int32"), X],
    ),
    "scatter_update": (
        lambda x, u: ops.scatter_update(x, np.array([[0], [3]], "int32"), u),
        [X, numbers(2, 6)],
    ),
    "searchsorted": (
        ops.searchsorted,
        [np.sort(numbers(8)), VECTOR],
    ),
    **{
        name: [
            (
                "",
                lambda x, f=name: getattr(ops, f)(x, IDS, 3),
                [X],
            ),
            (
                "ids",
                lambda x, ids, f=name: getattr(ops, f)(x, ids, 4),
                [X, IDS],
            ),
        ]
        for name in (
            "segment_max",
            "segment_min",
            "segment_prod",
            "segment_sum",
        )
    },
    "select": (
        lambda x, y: ops.select([x > 0.5, x < -0.5], [x, y], 3.0),
        [X, numbers(4, 6, seed=1)],
    ),
    "slice": (lambda x: ops.slice(x, (1, 2), (2, 4)), [X]),
    "slice_update": (
        lambda x, u: ops.slice_update(x, (1, 2), u),
        [X, numbers(2, 4)],
    ),
    "split": [
        ("axis 0", lambda x: ops.split(x, 2), [X]),
        ("axis 1", lambda x: ops.split(x, [1, 4], 1), [X]),
    ],
    "hsplit": (lambda x: ops.hsplit(x, 3), [X]),
    "vsplit": (lambda x: ops.vsplit(x, 2), [X]),
    "squeeze": [
        ("", ops.squeeze, [X[:, None]]),
        ("axis 0", lambda x: ops.squeeze(x, 0), [X[None]]),
    ],
    "stack": [
        (
            f"axis {axis}",
            lambda x, y, a=axis: ops.stack([x, y], a),
            [X, numbers(4, 6, seed=1)],
        )
        for axis in (0, 1, 2)
    ],
    **{
        name: (
            lambda x, y, f=name: getattr(ops, f)([x, y]),
            [X, numbers(4, 6, seed=1)],
        )
        for name in ("dstack", "hstack", "vstack")
    },
    "swapaxes": (lambda x: ops.swapaxes(x, 0, 2), [X3]),
    "take": [
        (f"axis {axis}", lambda x, a=axis: ops.take(x, IDS, a), [X])
        for axis in (None, 0, 1)
    ],
    "take_along_axis": [
        (
            "",
            lambda x, i: ops.take_along_axis(x, i, 1),
            [X, integers(0, 6, 4, 2)],
        ),
        (
            "axis 0",
            lambda x, i: ops.take_along_axis(x, i, 0),
            [X, integers(0, 4, 2, 6)],
        ),
    ],
    "tile": [
        (str(n), lambda x, r=n: ops.tile(x, r), [X])
        for n in ((2, 1), (1, 2), (2, 1, 1))
    ],
    "top_k": [
        ("", lambda x: ops.top_k(x, 3), [X]),
        ("unsorted", lambda x: ops.sort(ops.top_k(x, 2, False)[0]), [X]),
    ],
    "trace": [
        ("", ops.trace, [X]),
        ("axes", lambda x: ops.trace(x, 0, 1, 2), [X3]),
    ],
    "transpose": [
        ("", ops.transpose, [X]),
        ("axes", lambda x: ops.transpose(x, (1, 2, 0)), [X3]),
    ],
    "unfold": (lambda x: ops.unfold(x, 2), [numbers(2, 4, 6, 8)]),
    "unique": [
        ("", ops.unique, [integers(0, 6, 4, 6)]),
        (
            "counts",
            lambda x: ops.unique(x, return_counts=True),
            [integers(0, 6, 8)],
        ),
    ],
    "unravel_index": (
        lambda x: ops.unravel_index(x, (4, 6)),
        [integers(0, 24, 4, 2)],
    ),
    "unstack": [
        (f"axis {axis}", lambda x, a=axis: ops.unstack(x, axis=a), [X])
        for axis in (0, 1)
    ],
    "view": (lambda x: ops.view(x, "int32"), [X]),
    "where": [
        (
            "",
            ops.where,
            [X > 0, numbers(4, 6, seed=1), numbers(4, 6, seed=2)],
        ),
        (
            "broadcast",
            lambda x, y: ops.where(x > 0, x, y),
            [X, VECTOR],
        ),
    ],
    **{
        name: (getattr(ops, name), [X])
        for name in (
            "celu",
            "copy",
            "elu",
            "glu",
            "hard_shrink",
            "ones_like",
            "soft_shrink",
            "zeros_like",
        )
    },
    **{
        name: (lambda x, f=name: getattr(ops, f)(x), [X])
        for name in ("isreal", "imag", "real", "angle", "conj", "conjugate")
    },
    **{
        name: [
            (
                "",
                getattr(ops, name),
                [integers(0, 3, 4, 6), integers(0, 3, 4, 6, seed=1)],
            )
        ]
        for name in ("equal", "not_equal", "heaviside")
    },
    **{
        name: [
            ("rows", getattr(ops, name), [X]),
            ("deep", getattr(ops, name), [X3]),
        ]
        for name in ("fliplr", "flipud")
    },
    **{
        name: [
            ("", getattr(ops, name), [X]),
            ("offset", lambda x, f=name: getattr(ops, f)(x, -1), [X3]),
        ]
        for name in ("tril", "triu")
    },
    "argsort": [
        (f"axis {axis}", lambda x, a=axis: ops.argsort(x, a), [X])
        for axis in (0, 1)
    ],
    "sort": [
        (f"axis {axis}", lambda x, a=axis: ops.sort(x, a), [X])
        for axis in (0, 1)
    ],
}
