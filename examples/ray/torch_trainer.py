"""Runs a script in the workers of Ray Train's `TorchTrainer`.

python examples/ray/torch_trainer.py --workers 4 --restarts 1 \
    --storage /shared/folder examples/engines/train.py --backup /shared/folder

After an error, or if a worker is killed, Ray starts all workers again. A script
that saves with `keras.callbacks.BackupAndRestore` goes on where it was.
"""

import argparse
import os
import runpy
import sys

import ray
from ray import train
from ray.train.torch import TorchTrainer


def work(config):
    """Runs the script in a worker, which has joined the others already."""
    argv = sys.argv = config["argv"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    runpy.run_path(argv[0], run_name="__main__")


def main():
    """Starts the workers and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--storage", required=True, help="a shared folder")
    parser.add_argument("--gpu", action="store_true", help="one per worker")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    # Workers run in other folders.
    argv = [os.path.abspath(options.script), *options.args]
    ray.init(runtime_env={"env_vars": {"KERAS_BACKEND": "torch"}})
    TorchTrainer(
        work,
        train_loop_config={"argv": argv},
        scaling_config=train.ScalingConfig(
            num_workers=options.workers, use_gpu=options.gpu
        ),
        run_config=train.RunConfig(
            storage_path=os.path.abspath(options.storage),
            failure_config=train.FailureConfig(max_failures=options.restarts),
        ),
    ).fit()


if __name__ == "__main__":
    main()
