"""Declarative tensor parallelism for Keras 3 on every distributed backend."""

# Before Keras is imported, because Keras imports TensorFlow.
from keras_tp import startup  # isort: skip
from keras_tp import keras_import  # isort: skip
from keras_tp import callbacks
from keras_tp import distribution
from keras_tp.distribution.distribution_lib import install
from keras_tp.distribution.distribution_lib import uninstall
from keras_tp.tensor_parallel_keras import TensorParallelKeras
from keras_tp.version import __version__
