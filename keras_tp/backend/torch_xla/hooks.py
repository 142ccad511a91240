"""The hook table: replaced attributes of Keras.

XLA splits every operation, so these rows only place variables, batches and
random numbers.
"""

import functools

import torch_xla
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend import rematerialization as remat
from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import around
from keras_tp.backend.hooks import methods_row
from keras_tp.backend.processes import callbacks
from keras_tp.backend.saving import one_writer
from keras_tp.backend.torch_shared import export
from keras_tp.backend.torch_shared import layer_parameters
from keras_tp.backend.torch_xla import activations
from keras_tp.backend.torch_xla import batches
from keras_tp.backend.torch_xla import convolution
from keras_tp.backend.torch_xla import devices
from keras_tp.backend.torch_xla import pooling
from keras_tp.backend.torch_xla import products
from keras_tp.backend.torch_xla import random_draws
from keras_tp.backend.torch_xla import variables
from keras_tp.backend.torch_xla import vocab_parallel


def _hook_make_function(original):
    """Splits the batches of a step function, and runs each step at once."""
    attribute = original.__name__.removeprefix("make_")

    @functools.wraps(original)
    def make_function(self, force=False):
        made = getattr(self, attribute)
        result = original(self, force)
        step = getattr(self, attribute)
        if distribution() is not None and step is not made:
            setattr(self, attribute, _distributed(step))
        return result

    return make_function


def _distributed(step):
    @functools.wraps(step)
    def distributed_step(data):
        outputs = step(batches.distribute_batch(data))
        # Otherwise the steps of an epoch would be one program.
        torch_xla.sync()
        return outputs

    return distributed_step


_CORE = "keras.src.backend.torch.core"
_LAYER = "keras.src.backend.torch.layer:TorchLayer"
_NUMPY = "keras.src.backend.torch.numpy"
_RANDOM = "keras.src.backend.torch.random"
_TRAINER = "keras.src.backend.torch.trainer"

TABLE = [
    *(
        Hook(
            f"keras.src.backend.torch.{module}",
            "get_device",
            devices.hook_get_device,
            "models with a distribution are on XLA's devices",
        )
        for module in ("core", "image", "math", "nn", "numpy", "random")
    ),
    Hook(
        f"{_CORE}:Variable",
        "_initialize",
        variables.hook_initialize,
        "each device holds its part of a variable",
    ),
    Hook(
        f"{_CORE}:Variable",
        "_initialize_with_initializer",
        variables.hook_initialize_with_initializer,
        "what a file has values for is not drawn first",
    ),
    Hook(
        f"{_CORE}:Variable",
        "_direct_assign",
        variables.hook_direct_assign,
        "a variable stays split when it gets another value",
    ),
    Hook(
        "keras.src.optimizers.base_optimizer:BaseOptimizer",
        "apply",
        around(variables.apply),
        "a loop outside of a scope updates variables on XLA's devices",
    ),
    Hook(
        _LAYER,
        "named_parameters",
        layer_parameters.hook_named_parameters,
        "zero_grad finds the variables of a model that was moved",
    ),
    Hook(
        _LAYER,
        "_track_variables",
        layer_parameters.hook_track_variables,
        "building a layer does not plan a part of a model",
    ),
    methods_row(
        _NUMPY,
        products.Functions,
        "products of one input add up its gradient together",
    ),
    Hook(
        "torch",
        "matmul",
        around(products.matmul),
        "stacks of matrices, as of heads, stay split",
    ),
    methods_row(
        "torch.nn.functional",
        activations.Functions,
        "gradients of elu, celu and selu are correct",
    ),
    methods_row(
        "keras.src.backend.torch.nn",
        convolution.Functions,
        "images that are split along the height are convolved correctly",
    ),
    Hook(
        "torch.nn.functional",
        ("conv1d", "conv2d", "conv3d"),
        around(convolution.conv),
        "gradients of kernels are correct on meshes of two axes",
    ),
    Hook(
        "torch.nn.functional",
        ("max_pool1d", "max_pool2d", "max_pool3d"),
        around(pooling.max_pool),
        "gradients are correct where pooling windows cross two devices",
    ),
    Hook(
        "torch.nn.functional",
        "scaled_dot_product_attention",
        around(products.attention),
        "attention stays split by heads",
    ),
    Hook(
        "keras.src.backend.torch.math",
        "top_k",
        around(vocab_parallel.top_k),
        "the largest of split values are found without a gather of the values",
    ),
    remat.row("torch", lambda f, plain: f),
    Hook(
        _RANDOM,
        random_draws.NAMES,
        random_draws.hook_draw,
        "random numbers are those of one device",
    ),
    Hook(
        _RANDOM,
        "dropout",
        random_draws.hook_dropout,
        "random numbers are those of one device",
    ),
    Hook(
        f"{_TRAINER}:TorchTrainer",
        ("make_train_function", "make_test_function", "make_predict_function"),
        _hook_make_function,
        "the batches of a step are split",
    ),
    *callbacks.table(),
    *one_writer.table(
        lambda model: False,
        functools.partial(export.exporting, variables.whole),
    ),
]
