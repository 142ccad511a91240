"""Runs a model on symbolic tensors and records its operations.

The `call` of every layer runs on `KerasTensor`s, so the trace consists of Keras
operations on every backend. No variable needs a value.
"""

import contextlib
import inspect
import re

import keras
from keras import tree
from keras.src.layers import layer as layer_module
from keras.src.layers.layer import Layer
from keras.src.ops.operation import Operation

from keras_tp.distribution import derived_variables
from keras_tp.distribution.planning import again
from keras_tp.distribution.planning import discarded
from keras_tp.distribution.planning import graph as graph_lib
from keras_tp.distribution.planning import model_inputs as inputs_lib
from keras_tp.distribution.planning import rules
from keras_tp.distribution.planning import symbolic_ops as symbolic_lib

# Attributes in which Keras itself keeps track of variables.
_TRACKING = (
    "_trainable_variables",
    "_non_trainable_variables",
    "_tracker",
    "_layers",
    "_metrics",
    "_seed_generators",
    "_self_unconditional_checkpoint_dependencies",
    "_self_unconditional_dependency_names",
)
# Prefixes of the lines that Keras puts before the error of a layer.
_LINES_OF_KERAS = ("Exception encountered", "Could not automatically infer")


def trace(model, input_spec=None):
    """Returns the `Graph` of a model's forward pass.

    Unknown dims get placeholder sizes. The batch is `graph.batch`, dims of
    images are `IMAGE_SIZE`, others are `graph.length`. The first and the last
    are primes that divide no known dim, so a result's size shows both.

    Args:
        model: Keras model (or layer); built, or called symbolically here.
        input_spec: Structure of `KerasTensor`s or shape tuples, the model's
            inputs. Defaults to `None`, for a model that knows its own.

    Returns:
        A `Graph`. Layers that cannot be traced through are leaves of it.

    Raises:
        NoPlanError: if the model's inputs are not known, or the model cannot
            be called on symbolic inputs.
    """
    with (
        discarded.no_trace_left(),
        keras.StatelessScope(initialize_variables=False),
    ):
        spec = inputs_lib.call_spec_of(model, input_spec)
        inputs_lib.narrow(spec, model)
        if not model.built:
            args, kwargs = inputs_lib.symbolic(spec, 2, 16)
            model(*args, **kwargs)
        graph = graph_lib.Graph(
            model.name, *inputs_lib.standing_sizes(model, spec)
        )
        call = inputs_lib.symbolic(spec, graph.batch, graph.length)
        failure = _Failure()
        with failure:
            _Tracer(graph, model).run(*call)
    if failure.error is not None:
        raise inputs_lib.NoPlanError(
            f"Model {model.name!r} cannot be planned, because its call on "
            f"symbolic inputs fails: {_reason(failure.error)}. To set unknown "
            "dims of its inputs, pass `input_spec` to `plan_sharding`. "
            f"Received: model={model}"
        ) from failure.error
    return graph


def trace_build(build_fn, input_spec=None):
    """Builds a model without weights, traces it and discards it.

    Args:
        build_fn: Callable without arguments that returns a model.
        input_spec: As for `trace`.

    Returns:
        A `Graph`. Name counters, random state and global state are as before.
    """
    with discarded.built_without_weights(build_fn) as model:
        return trace(model, input_spec)


class _SymbolicVariable(keras.KerasTensor):
    """Stands for a variable during a trace; it has no value."""

    def __init__(self, variable):
        super().__init__(variable.shape, variable._dtype, name=variable.name)
        self.variable = variable
        self.path = variable.path
        self.trainable = variable.trainable

    regularizer = constraint = None

    @property
    def dtype(self):
        # That of the layer that reads it, such as bfloat16.
        return self.variable.dtype

    @property
    def value(self):
        return self

    handle = value

    def assign(self, value):
        return value

    assign_add = assign_sub = assign


class _Tracer:
    """Fills a graph with the operations of one symbolic call of a model."""

    def __init__(self, graph, model):
        self.graph = graph
        self.model = model
        self.around = []
        self.symbols = {}
        self.value_of = {}
        # Keeps tensors alive: an id is unique only among live objects.
        self.kept = []
        values = {id(v): self.value(v) for v in model.weights}.values()
        graph.variables = sorted(
            values, key=lambda v: (graph_lib.natural(v.path), v.shape)
        )
        graph.derived = [
            (self.value(variable), dims, self.value(kernel))
            for layer in model._flatten_layers()
            for variable, dims, kernel in derived_variables.derived_of(layer)
        ]

    def run(self, args, kwargs):
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.symbolic_variables())
            stack.enter_context(self.hooks())
            self.graph.inputs = [
                self.value(tensor, graph_lib.INPUT)
                for tensor in tree.flatten((args, kwargs))
                if isinstance(tensor, keras.KerasTensor)
            ]
            outputs = self.model(*args, **kwargs, **self.inference())
            self.graph.outputs = [
                self.value(tensor)
                for tensor in tree.flatten(outputs)
                if isinstance(tensor, keras.KerasTensor)
            ]

    def inference(self):
        takes = getattr(self.model, "_call_has_training_arg", True)
        return {"training": False} if takes else {}

    def value(self, tensor, kind=graph_lib.RESULT):
        """Returns the `Value` of a tensor or variable; creates missing ones."""
        if isinstance(tensor, _SymbolicVariable):
            tensor = tensor.variable
        value = self.value_of.get(id(tensor))
        if value is None:
            path, trainable, dtype = "", False, tensor.dtype
            if isinstance(tensor, keras.Variable):
                kind = graph_lib.VARIABLE
                path, trainable = tensor.path, tensor.trainable
                dtype = tensor._dtype
            elif not isinstance(tensor, keras.KerasTensor):
                kind = graph_lib.CONSTANT
            elif self.around:
                path = self.path()
            value = self.graph.new_value(
                kind,
                tuple(int(size or 1) for size in tensor.shape),
                keras.backend.standardize_dtype(dtype),
                path,
                trainable,
            )
            self.value_of[id(tensor)] = value
            self.kept.append(tensor)
        return value

    def path(self):
        """Returns the path of the innermost layer."""
        if not self.around:
            return ""
        layer = self.around[-1]
        # A layer without variables may have no path.
        return layer.path or f"{layer._parent_path}/{layer.name}".lstrip("/")

    def record(self, operation, args, kwargs, outputs, layer=None):
        args, kwargs = tree.map_structure(self.encoded, (args, kwargs))
        self.graph.steps.append(
            graph_lib.Step(
                operation,
                args,
                kwargs,
                [
                    self.value(tensor)
                    for tensor in tree.flatten(outputs)
                    if isinstance(tensor, keras.KerasTensor)
                ],
                self.path(),
                layer is not None,
                [self.value(v) for v in layer.weights] if layer else [],
            )
        )

    def note_output(self, layer, outputs):
        """Records the output of a layer, in order if none is inside of it."""
        value = self.value_of.get(id(outputs))
        if value is None:
            return
        self.graph.returned.add(value.index)
        if isinstance(layer, keras.layers.Dropout) and layer.rate:
            self.graph.dropped.append(value)
        if not layer._layers:
            position = len(self.graph.steps)
            self.graph.layer_outputs.append((self.path(), position, value))

    def encoded(self, x):
        is_tensor = hasattr(x, "shape") and hasattr(x, "dtype")
        return self.value(x) if is_tensor else x

    def call_layer(self, layer, *args, **kwargs):
        """Replaces `Layer.symbolic_call`: enters a layer, or records a leaf."""
        self.around.append(layer)
        steps, leaves = len(self.graph.steps), dict(self.graph.leaves)
        returned = len(self.graph.layer_outputs)
        failure = _Failure()
        try:
            if not rules.is_leaf(layer):
                with failure:
                    outputs = layer.call(*args, **kwargs)
                    self.note_output(layer, outputs)
                    again.note(self.graph, layer, outputs, steps)
                    return outputs
                del self.graph.steps[steps:]
                del self.graph.layer_outputs[returned:]
                self.graph.leaves = leaves
                self.graph.leaves[self.path()] = failure.text
            with self.real_variables(layer), self.unhooked():
                outputs = _output_spec(layer, args, kwargs)
            self.record(layer, args, kwargs, outputs, layer)
            again.note(self.graph, layer, outputs, steps)
            return outputs
        finally:
            self.around.pop()

    def call_operation(self, operation, *args, **kwargs):
        """Replaces `Operation.symbolic_call`: records the operation."""
        outputs = operation.compute_output_spec(*args, **kwargs)
        if not isinstance(outputs, int):
            self.record(operation, args, kwargs, outputs)
        return outputs

    @contextlib.contextmanager
    def hooks(self):
        call_layer, call_operation = self.call_layer, self.call_operation
        self.original = _symbolic_calls()
        self.own = (
            lambda layer, *a, **k: call_layer(layer, *a, **k),
            lambda op, *a, **k: call_operation(op, *a, **k),
            lambda *a, **k: None,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(_set_symbolic_calls, *self.original)
            _set_symbolic_calls(*self.own)
            self.replaced = stack.enter_context(contextlib.ExitStack())
            self.replaced.enter_context(symbolic_lib.replaced())
            yield

    @contextlib.contextmanager
    def unhooked(self):
        _set_symbolic_calls(*self.original)
        self.replaced.close()
        try:
            yield
        finally:
            self.replaced.enter_context(symbolic_lib.replaced())
            _set_symbolic_calls(*self.own)

    @contextlib.contextmanager
    def symbolic_variables(self):
        """Replaces the variables in the attributes of all layers."""
        self.swapped = {}
        try:
            for layer in self.model._flatten_layers(include_self=True):
                self.swapped[id(layer)] = self.swap(layer)
            yield
        finally:
            for attributes, swapped in self.swapped.values():
                attributes.update({k: real for k, (real, _) in swapped.items()})

    def swap(self, layer):
        swapped = {}
        for name, real in vars(layer).items():
            if name not in _TRACKING:
                symbolic = self.symbolic(real)
                if symbolic is not real:
                    swapped[name] = real, symbolic
        vars(layer).update({name: pair[1] for name, pair in swapped.items()})
        return vars(layer), swapped

    def symbolic(self, x):
        if isinstance(x, keras.Variable):
            if id(x) not in self.symbols:
                self.symbols[id(x)] = _SymbolicVariable(x)
            return self.symbols[id(x)]
        if isinstance(x, dict):
            if any(isinstance(v, keras.Variable) for v in x.values()):
                return {key: self.symbolic(v) for key, v in x.items()}
        if isinstance(x, (list, tuple)):
            if any(isinstance(v, keras.Variable) for v in x):
                return [self.symbolic(v) for v in x]
        return x

    @contextlib.contextmanager
    def real_variables(self, layer):
        """Returns a context in which a leaf has its real variables."""
        pairs = [
            self.swapped[id(part)]
            for part in layer._flatten_layers(include_self=True)
            if id(part) in self.swapped
        ]
        for attributes, swapped in pairs:
            attributes.update({k: real for k, (real, _) in swapped.items()})
        try:
            yield
        finally:
            for attributes, swapped in pairs:
                attributes.update({k: s for k, (_, s) in swapped.items()})


class _Failure:
    """Catches any exception that a layer's `call` raises.

    A layer may raise anything, and the errors of a framework that is called on
    a symbolic tensor have no common base class.
    """

    text = ""
    error = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, Exception):
            self.error = error
            lines = str(error).strip().splitlines() or [""]
            self.text = f"{kind.__name__}: {lines[0][:100]}"
            return True
        return False


def _reason(error):
    """Returns the type of an error and the first line that is not Keras's."""
    text = re.sub("\x1b\\[[0-9]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Keras adds lines above, and the arguments of the call below.
    own = [line for line in lines if not line.startswith(_LINES_OF_KERAS)]
    return f"{type(error).__name__}: {(own or lines or [''])[0]}"


def _output_spec(layer, args, kwargs):
    """Calls `compute_output_spec` like Keras: `training` only if accepted."""
    takes = inspect.signature(layer.compute_output_spec).parameters.values()
    if not any(p.name == "training" or p.kind == p.VAR_KEYWORD for p in takes):
        kwargs = {k: v for k, v in kwargs.items() if k != "training"}
    return layer.compute_output_spec(*args, **kwargs)


def _symbolic_calls():
    return Layer.symbolic_call, Operation.symbolic_call, layer_module.Node


def _set_symbolic_calls(of_layer, of_operation, node):
    Layer.symbolic_call = of_layer
    Operation.symbolic_call = of_operation
    layer_module.Node = node
