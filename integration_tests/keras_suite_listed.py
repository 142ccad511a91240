"""Tests of Keras that need not pass under a distribution, and why."""

import collections
import fnmatch


class Listed(
    collections.namedtuple(
        "Listed", ["pattern", "backends", "distributions", "reason"]
    )
):
    """Tests that may fail under a distribution.

    Args:
        pattern: String, a pattern of `fnmatch` for ids of tests.
        backends: Tuple of names of backends.
        distributions: Tuple of names of distributions of `keras_suite.py`.
        reason: String, what in the test, or in Keras, is at fault.
    """


ALL = ("jax", "tensorflow", "torch")
ANY = ("data", "map", "tensor")

LISTED = [
    *(
        Listed(
            pattern,
            ("tensorflow",),
            ANY,
            "asserts that a sparse gradient stays an IndexedSlices: slots are "
            "split as their variable is, and DTensor has no sparse tensors, so "
            "it is made dense; test_sparse_correctness passes",
        )
        for pattern in (
            "trainers/trainer_test.py::TestTrainer::test_fit_sparse_*",
            "optimizers/optimizer_sparse_test.py::*::test_sparse_gradients_*",
        )
    ),
]


def reason_for(test, backend, distribution):
    """Returns why a test need not pass, or `None`."""
    for row in LISTED:
        if (
            backend in row.backends
            and distribution in row.distributions
            and fnmatch.fnmatchcase(test, row.pattern)
        ):
            return row.reason
    return None
