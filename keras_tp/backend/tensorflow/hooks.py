"""The hook table of the TensorFlow backend."""

from keras_tp.backend import rematerialization as remat
from keras_tp.backend.hooks import Hook
from keras_tp.backend.processes import callbacks
from keras_tp.backend.processes import data_shards
from keras_tp.backend.saving import one_writer
from keras_tp.backend.tensorflow import batches
from keras_tp.backend.tensorflow import errors
from keras_tp.backend.tensorflow import functions
from keras_tp.backend.tensorflow import gradient_sums
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import processes
from keras_tp.backend.tensorflow import rematerialization
from keras_tp.backend.tensorflow import training
from keras_tp.backend.tensorflow import variables
from keras_tp.backend.tensorflow.ops import table

_VARIABLE = "keras.src.backend.tensorflow.core:Variable"
_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
_OPTIMIZER = "keras.src.backend.tensorflow.optimizer:TFOptimizer"


def _is_distributed(model):
    return any(map(variables.is_distributed, model.variables))


TABLE = [
    Hook(
        "keras.src.backend.tensorflow.trainer:TFEpochIterator",
        "__init__",
        batches.hook_epoch_iterator,
        "processes read batches in step, or stop with an error",
    ),
    *callbacks.table(),
    *data_shards.table(processes),
    *one_writer.table(_is_distributed, variables.exporting),
    Hook(
        _VARIABLE,
        "_initialize",
        variables.hook_initialize,
        "a variable is split from the start, with the values of one device",
    ),
    Hook(
        _VARIABLE,
        "_initialize_with_initializer",
        variables.hook_initialize_with_initializer,
        "a variable that is loaded is not drawn before",
    ),
    Hook(
        _OPTIMIZER,
        ("add_variable_from_reference", "_var_key"),
        variables.hook_identify,
        "an optimizer is made without drawing what is loaded",
    ),
    Hook(
        _VARIABLE,
        "_direct_assign",
        variables.hook_direct_assign,
        "an assigned value gets the layout of the variable",
    ),
    Hook(
        "tensorflow.python.ops.resource_variable_ops:ResourceVariable",
        (
            *("assign", "assign_add", "assign_sub", "batch_scatter_update"),
            *(
                f"scatter_{name}"
                for name in (
                    *("add", "div", "max", "min", "mul", "sub", "update"),
                    *("nd_add", "nd_max", "nd_min", "nd_sub", "nd_update"),
                )
            ),
        ),
        variables.hook_write,
        "a variable that is not on the mesh does not change once per device",
    ),
    Hook(
        "tensorflow.python.ops.stateful_random_ops:Generator",
        "_skip_single_var",
        variables.hook_skip,
        "devices do not draw different numbers",
    ),
    Hook(
        "tensorflow.dtensor.python.dtensor_device:DTensorDevice",
        "_experimental_default_mesh",
        placement.hook_default_mesh,
        "the scope of the mesh ends after an error in a step",
    ),
    *(
        Hook(
            "tensorflow.dtensor.python.dtensor_device:DTensorDevice",
            name,
            hook,
            "DTensor finds the layout of a variable, on the mesh and off it",
        )
        for name, hook in (
            ("is_dtensor", variables.hook_is_dtensor),
            ("fetch_layout", variables.hook_fetch_layout),
        )
    ),
    Hook(
        "keras.src.backend.tensorflow.core",
        "custom_gradient",
        lambda original: placement.custom_gradient,
        "a custom gradient runs on the mesh of its function",
    ),
    Hook(
        "keras.src.backend",
        "convert_to_numpy",
        variables.hook_convert_to_numpy,
        "the parts of a tensor are concatenated on the host",
    ),
    Hook(
        _TRAINER,
        "_make_function",
        training.hook_make_function,
        "train and test steps run on the mesh",
    ),
    Hook(
        "tensorflow.python.framework.func_graph:FuncGraph",
        "capture",
        training.hook_capture,
        "a tensor that a layer creates in `build` is on the mesh",
    ),
    Hook(
        "tensorflow.python.pywrap_tfe",
        "TFE_Py_FastPathExecute",
        training.hook_execute,
        "such a tensor is put on the mesh for an eager operation too",
    ),
    Hook(
        "tensorflow.python.eager.polymorphic_function"
        ".polymorphic_function:Function",
        "__call__",
        functions.hook_call,
        "a user's tf.function that reads a split variable runs on the mesh",
    ),
    Hook(
        "tensorflow.python.eager.backprop:GradientTape",
        "gradient",
        errors.hook_gradient,
        "an operation whose gradient DTensor lacks is named in a custom loop",
    ),
    Hook(
        "tensorflow.python.ops.gen_math_ops",
        "add_n",
        gradient_sums.hook_add_n,
        "gradients of several products are added up before one sum over the "
        "devices",
    ),
    Hook(
        _TRAINER,
        "make_predict_function",
        training.hook_make_predict_function,
        "predict steps run on the mesh",
    ),
    Hook(
        "keras_hub.src.models.causal_lm:CausalLM",
        "make_generate_function",
        training.hook_make_generate_function,
        "KerasHub's generate compiles for the mesh",
        waits=True,
    ),
    Hook(
        _TRAINER,
        "_maybe_symbolic_build",
        training.hook_maybe_symbolic_build,
        "variables are made before the first step is traced",
    ),
    Hook(
        _TRAINER,
        "get_metrics_result",
        training.hook_get_metrics_result,
        "metric results are computed on the devices of the metrics",
    ),
    Hook(
        _TRAINER,
        "_resolve_auto_jit_compile",
        training.hook_resolve_auto_jit_compile,
        "a step on a mesh is compiled with XLA only on request",
    ),
    remat.row("tensorflow", rematerialization.keeping),
    Hook(
        "keras.src.layers.layer:Layer",
        "__call__",
        training.hook_layer_call,
        "the outermost eager call runs on the mesh",
    ),
    Hook(
        _OPTIMIZER,
        "apply",
        training.hook_apply,
        "gradients of embeddings are dense, as DTensor needs them",
    ),
    table.ROW,
]
