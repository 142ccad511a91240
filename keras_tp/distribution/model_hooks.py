"""Hooks of all backends: each model runs under its own distribution."""

import contextlib

from keras.src import backend as keras_backend
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.distribution.distribution_lib import distribution
from keras.src.models.model import Model
from keras.src.utils.backend_utils import in_tf_graph

from keras_tp import backend
from keras_tp.backend import hooks
from keras_tp.backend.hooks import Hook
from keras_tp.backend.processes import progress
from keras_tp.backend.saving import expected_values
from keras_tp.backend.saving import lazy_modules
from keras_tp.backend.saving import other_backends
from keras_tp.distribution import checkpoint_hooks
from keras_tp.distribution import derived_variables
from keras_tp.distribution import model_state
from keras_tp.distribution import optimizer_slots
from keras_tp.distribution import preset_files
from keras_tp.distribution import recurrent
from keras_tp.distribution import state_trees
from keras_tp.distribution import variable_origin
from keras_tp.distribution import weight_files
from keras_tp.distribution.model_state import adopt_state
from keras_tp.distribution.model_state import check_complete_model
from keras_tp.distribution.model_state import check_model
from keras_tp.distribution.model_state import distribution_of
from keras_tp.distribution.model_state import entered
from keras_tp.distribution.model_state import may_move_after_call
from keras_tp.distribution.planning import model_inputs
from keras_tp.distribution.variable_origin import scope_of

# Methods that all processes enter together, as one step.
_STEPS = ("train_on_batch", "test_on_batch", "predict_on_batch", "generate")


@hooks.around
def _hook_entry_point(original, self, /, *args, **kwargs):
    """Runs `fit`, `evaluate` and others under the model's own distribution."""
    name = original.__name__
    with entered(self), progress.method(name):
        if name in _STEPS and distribution() is not None:
            progress.together(f"`{name}`")
        adopt_state(self)
        _renew_functions(self)
        check_complete_model(self)
        made = variable_origin.variables_made()
        result = original(self, *args, **kwargs)
        if _has_changed(self, made):
            check_model(self)
        return result


@hooks.around
def _hook_compile(original, self, /, *args, **kwargs):
    # KerasHub may be imported by now: its tasks compile in `__init__`.
    hooks.install_imported()
    with entered(self):
        check_complete_model(self)
        return original(self, *args, **kwargs)


@hooks.around
def _hook_symbolic_build(original, self, /, *args, **kwargs):
    """Checks a model that `fit` has built, and adopts its metrics."""
    made = variable_origin.variables_made()
    known = len(self.metrics_variables)
    original(self, *args, **kwargs)
    if _has_changed(self, made):
        check_model(self)
        adopt_state(self)
    elif len(self.metrics_variables) != known:
        # Metrics that were made before the distribution.
        adopt_state(self)


def _has_changed(model, made):
    """Returns whether a model may have to be checked, or its state adopted.

    Keras calls `_symbolic_build` for each `fit`, and nearly always builds
    nothing.

    Args:
        model: A Keras model.
        made: Int, `variables_made()` before.
    """
    is_new = variable_origin.variables_made() != made
    return is_new or not model_state.was_checked(model)


@hooks.around
def _hook_call(original, self, /, *args, **kwargs):
    """Runs the outermost call of a model under its distribution.

    Symbolic calls, which build functional models, are left alone.
    """
    if model_state.outermost_call() is not None:
        return original(self, *args, **kwargs)
    if any_symbolic_tensors(args, kwargs):
        # KerasHub may be imported by now: it reads a preset's weights next.
        hooks.install_imported()
        return original(self, *args, **kwargs)
    if _in_tf_graph():
        return original(self, *args, **kwargs)
    with model_state.calling(self):
        if not isinstance(self, Model):
            own = distribution_of(self)
            with scope_of(own) if own else contextlib.nullcontext():
                return original(self, *args, **kwargs)
        with entered(self):
            check_complete_model(self)
            outputs = original(self, *args, **kwargs)
            if may_move_after_call(self):
                check_model(self)
            return outputs


def _in_tf_graph():
    """Returns whether a call is part of a graph of TensorFlow."""
    if keras_backend.backend() != "tensorflow":
        # torch's compiler cannot trace the question to TensorFlow.
        if backend.distribution_lib.is_tracing():
            return False
    return in_tf_graph()


@hooks.around
def _hook_maybe_build(original, self, call_spec):
    """Plans a model that its first call has built, before it computes."""
    original(self, call_spec)
    if isinstance(self, Model):
        # The planner sets no distribution: its sizes are made up.
        if distribution() is not None:
            model_inputs.note_call(self, call_spec)
        if self is model_state.outermost_call():
            model_state.build_parts(self, call_spec)
            check_complete_model(self)


def _hook_value(original):
    """Plans a model before the value of one of its variables is read.

    A custom training loop may read values before it calls the model. A variable
    that waits to be loaded is drawn.
    """

    def value(self):
        # A layer that is adding variables is incomplete.
        if (
            getattr(self, "_awaits_plan", False)
            and not derived_variables.is_changing()
        ):
            model_state.plan_model_with(self)
        if expected_values.is_waiting(self):
            expected_values.draw(self)
        return original.fget(self)

    return property(value)


def _hook_threading(original):
    """Keeps the distribution when `clear_session` makes new thread-locals."""

    class Threading:
        @staticmethod
        def local():
            current = distribution()
            fresh = original.local()
            if current is not None:
                fresh.distribution = current
            return fresh

    return Threading


@hooks.around
def _hook_global_seed_generator(original):
    """Makes the global random state under no distribution: it outlives them."""
    with scope_of(None):
        return original()


@hooks.around
def _hook_before_quantizing(original, self, mode, compute_dtype):
    """Records a layer's kernels before quantization replaces them."""
    original(self, mode, compute_dtype)
    derived_variables.note_kernels(self, mode, distribution_of(self))


@hooks.around
def _hook_add_weight(original, self, /, *args, **kwargs):
    """Makes variables of LoRA and quantization follow the layer's kernel."""
    # Layers without LoRA have variables of their own only.
    if not hasattr(self, "enable_lora"):
        return original(self, *args, **kwargs)
    with derived_variables.changing(self) as noted:
        own = distribution_of(self) if self.weights else noted
        with scope_of(own):
            weight = original(self, *args, **kwargs)
    if self.built:
        self._changes = getattr(self, "_changes", 0) + 1
    return weight


def _renew_functions(model):
    """Drops a model's compiled functions if one of its layers has changed."""
    count = sum(getattr(p, "_changes", 0) for p in model._flatten_layers())
    if count != getattr(model, "_changes_compiled", 0):
        model_state.forget_functions(model)
        model._changes_compiled = count


_LAYER = "keras.src.layers.layer:Layer"
_MODEL = "keras.src.models.model:Model"

TABLE = [
    Hook(
        "keras.src.backend.common.variables:Variable",
        "__init__",
        variable_origin.note_origin,
        "a variable knows its role and the distribution it was made under",
    ),
    Hook(
        _LAYER,
        "__new__",
        variable_origin.note_layer,
        "a layer that is not built yet knows the distribution it is made under",
    ),
    Hook(
        _LAYER,
        "_maybe_build",
        _hook_maybe_build,
        "a model that its first call builds is planned before it computes",
    ),
    Hook(
        "keras.src.backend:Variable",
        "value",
        _hook_value,
        "a model is planned before a custom training loop uses it",
    ),
    Hook(
        _LAYER,
        "__call__",
        _hook_call,
        "a model is called under its own distribution",
    ),
    Hook(
        _LAYER,
        "stateless_call",
        _hook_call,
        "a stateless call of a model runs under its own distribution",
    ),
    *(
        Hook(
            _MODEL,
            name,
            _hook_entry_point,
            f"a model's {name} runs under its own distribution",
        )
        for name in (
            "fit",
            "evaluate",
            "predict",
            "train_on_batch",
            "test_on_batch",
            "predict_on_batch",
            "save",
            "save_weights",
            "export",
        )
    ),
    Hook(
        "keras_hub.src.models.causal_lm:CausalLM",
        "generate",
        _hook_entry_point,
        "a model of KerasHub generates under its own distribution",
        waits=True,
    ),
    # Not on Model: Keras compares a model's `compile` with this one to detect
    # an override.
    Hook(
        "keras.src.trainers.trainer:Trainer",
        "compile",
        _hook_compile,
        "layouts that match no variable are reported by `compile`",
    ),
    Hook(
        _MODEL,
        "_symbolic_build",
        _hook_symbolic_build,
        "a model that `fit` builds is checked and gets its layouts",
    ),
    Hook(
        "keras.src.saving.saving_lib",
        "load_weights_only",
        weight_files.check_before_loading,
        "a file that does not fit leaves the model unchanged",
    ),
    Hook(
        "keras_hub.src.utils.transformers.safetensor_utils",
        "safetensors",
        preset_files.read_in_parts,
        "a process reads its part of a preset of Hugging Face",
        waits=True,
    ),
    *(
        hooks.methods_row(
            f"keras_hub.src.utils.{loader}",
            expected_values.Loader,
            "a preset's model is made without drawing what is loaded",
        )._replace(waits=True)
        for loader in (
            "preset_utils:KerasPresetLoader",
            "transformers.preset_loader:TransformersPresetLoader",
            "timm.preset_loader:TimmPresetLoader",
        )
    ),
    Hook(
        "keras.src.saving.serialization_lib",
        "tf",
        lazy_modules.if_imported,
        "a save does not import TensorFlow: half a GB in each process",
    ),
    Hook(
        "keras.src.saving.serialization_lib",
        "_retrieve_class_or_fn",
        other_backends.hook_retrieve_class,
        "a model that was compiled on torch is trained on other backends",
    ),
    Hook(
        "keras.src.saving.saving_lib",
        "get_attr_skipset",
        weight_files.outside_of_the_pass,
        "checking a file makes no variable in a stateless scope",
    ),
    Hook(
        "keras.src.saving.saving_lib",
        "load_model",
        weight_files.name_file,
        "an unreadable file is named in the error",
    ),
    Hook(
        "keras.src.legacy.saving.legacy_h5_format",
        "load_model_from_hdf5",
        weight_files.name_file,
        "an unreadable file is named in the error",
    ),
    Hook(
        "keras.src.saving.saving_api",
        "_load_model_from_orbax_checkpoint",
        state_trees.load_whole,
        "a variable without a value is an error",
    ),
    Hook(
        _MODEL,
        "set_state_tree",
        state_trees.match_paths,
        "a value without a variable is an error",
    ),
    Hook(
        "keras.src.optimizers.base_optimizer:BaseOptimizer",
        "add_variable_from_reference",
        optimizer_slots.lay_out_slots,
        "optimizer slots are split over the batch axis on request",
    ),
    Hook(
        "keras.src.optimizers.base_optimizer:BaseOptimizer",
        "build",
        optimizer_slots.lay_out_own_state,
        "an optimizer made outside of a distribution can update its model",
    ),
    Hook(
        "keras.src.optimizers.adafactor:Adafactor",
        "build",
        optimizer_slots.lay_out_factors,
        "factored optimizer slots are split like their variable",
    ),
    Hook(
        _LAYER,
        "_check_quantize_args",
        _hook_before_quantizing,
        "the variables that replace a kernel are split like the kernel",
    ),
    Hook(
        _LAYER,
        "add_weight",
        _hook_add_weight,
        "variables of LoRA and quantization are split like the kernel",
    ),
    Hook(
        "keras.src.random.seed_generator",
        "global_seed_generator",
        _hook_global_seed_generator,
        "random state that outlives a distribution is not tied to its mesh",
    ),
    Hook(
        "keras.src.backend.common.global_state",
        "threading",
        _hook_threading,
        "clear_session keeps the distribution",
    ),
    *checkpoint_hooks.TABLE,
    *recurrent.TABLE,
]
