"""The meshes of `processes_script.py`: all that JAX has, and on TensorFlow one.

KERAS_TP_SLOW=1 tries all on each.
"""

import keras

from integration_tests import slow_tests

SHAPES = [(2, 2)]
if slow_tests.SLOW or keras.config.backend() == "jax":
    SHAPES = [(1, 4), (2, 2), (4, 1)]
NAMES = [f"{data}x{model}" for data, model in SHAPES]
