import concurrent.futures
import datetime

import pytest
import torch.distributed as dist

from keras_tp.backend.torch import restarts

COUNT = 3


def joined(store, ranks, timeout_s=60):
    """Returns the prefix of each process of one start."""
    timeout = datetime.timedelta(seconds=timeout_s)
    with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        started = [
            pool.submit(restarts.prefix, store, rank, COUNT, timeout)
            for rank in ranks
        ]
        return [task.result() for task in started]


@pytest.mark.parametrize("last", range(COUNT))
def test_each_start_has_its_own_keys(last):
    store = dist.HashStore()
    ranks = [rank for rank in range(COUNT) if rank != last] + [last]
    found = [joined(store, ranks) for _ in range(3)]
    assert all(len({*names}) == 1 for names in found)
    assert len({names[0] for names in found}) == 3


def test_a_process_does_not_take_the_name_of_an_older_start():
    store = dist.HashStore()
    joined(store, range(COUNT))
    with pytest.raises(TimeoutError, match="Process 0 did not join"):
        joined(store, [1], timeout_s=0.2)


def test_a_process_that_does_not_come_is_named():
    with pytest.raises(TimeoutError, match="Process 2 did not join"):
        joined(dist.HashStore(), [0, 1], timeout_s=0.2)
