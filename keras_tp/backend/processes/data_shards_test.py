import numpy as np
import pytest
import scipy.sparse

from keras_tp.backend.processes import data_shards


def matrix(seed):
    rng = np.random.default_rng(seed)
    return scipy.sparse.random(4, 6, density=0.3, random_state=rng)


def beside(other):
    """Returns the `gather` of a process that runs beside another one."""
    told = []
    list(data_shards.in_step([other], _noting(told), None, None))
    answers = iter(told)
    return lambda value, what: [value, next(answers)]


def _noting(told):
    def gather(value, what):
        told.append(value)
        return [value]

    return gather


def test_sparse_batches_are_compared():
    given = list(
        data_shards.in_step([matrix(1)], beside(matrix(1)), None, None)
    )
    assert len(given) == 1
    with pytest.raises(ValueError, match="hold different batches"):
        list(data_shards.in_step([matrix(1)], beside(matrix(2)), None, None))


def test_parts_of_sparse_batches_are_refused():
    parts = data_shards.Parts([0, 1], 2)
    with pytest.raises(ValueError, match="must be dense"):
        data_shards.fit_together(
            matrix(1), lambda value, what: [value, value], parts, None
        )
