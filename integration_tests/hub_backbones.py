"""Inputs, models and predicted collectives of KerasHub's backbones.

`hub_backbones_test.py` trains them, and `benchmarks/collectives_survey.py`
counts what they communicate. The models are those of
`benchmarks/plan_survey.py`.
"""

import contextlib
import functools
import math
import pathlib
import sys

import keras
import numpy as np
from keras.src.backend.common import dtypes

from integration_tests import hub_models
from keras_tp import distribution

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
BATCH = 2
# One step of SGD with this rate changes outputs by less than rounding grows.
RATE = 1e-3
# Models of the survey that plain Keras does not train here.
NOT_TRAINED = {
    "DFine": "its decoder wants more positions than small images have",
    "SAM": "Keras compares its outputs with targets of other shapes",
    "SAM3PromptableConcept": "needs torchvision on torch",
    "SigLIP": "its two outputs have one name, which `compile` refuses",
}
if keras.config.backend() != "torch":
    NOT_TRAINED["StableDiffusion3"] = "its scheduler reads a traced number"
# torch's convolution of float64 on CPUs refuses kernels that are transposed.
NOT_IN_FLOAT64 = ("BASNet",) if keras.config.backend() == "torch" else ()
# Model -> the operation that DTensor cannot run, on TensorFlow.
REFUSED = {}
if keras.config.backend() == "tensorflow":
    REFUSED = {"Gemma3n": "Reshape", "RWKV7": "TensorListStack"}


@functools.cache
def survey():
    """Returns builders by name, what inputs they need, and `gather_outputs`."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import plan_survey
    finally:
        sys.path.remove(str(BENCHMARKS))
    return (
        plan_survey.builders(),
        plan_survey.INPUT_SPECS,
        plan_survey.LEAST_GATHERED,
    )


def inputs_of(model, spec):
    """Returns a batch for a model: values that are possible as inputs."""
    rng = np.random.default_rng(5)
    given = {}
    if isinstance(spec, dict):
        given = {name: getattr(s, "shape", s) for name, s in spec.items()}
    elif spec is not None:
        tensors = keras.tree.flatten(model.input)
        shapes = [getattr(s, "shape", s) for s in spec]
        given = dict(zip([t.name for t in tensors], shapes, strict=True))

    def values(tensor):
        shape = given.get(tensor.name, tensor.shape)[1:]
        shape = (BATCH, *(size or hub_models.LENGTH for size in shape))
        if "mask" in tensor.name or tensor.dtype == "bool":
            return np.ones(shape, tensor.dtype)
        if "int" in tensor.dtype:
            few = any(k in tensor.name for k in ("segment", "position", "ind"))
            low, high = (0, 2) if few else (1, hub_models.VOCABULARY)
            return rng.integers(low, high, shape).astype("int32")
        return rng.standard_normal(shape, "float32")

    return keras.tree.map_structure(values, model.input)


def compile_model(model):
    """Compiles a model as it is trained: SGD, and "mse" for each output."""
    losses = keras.tree.map_structure(lambda _: "mse", model.output)
    is_task = hasattr(model, "backbone")
    # Theirs are for labels.
    kwargs = {"metrics": [], "weighted_metrics": []} if is_task else {}
    model.compile(keras.optimizers.SGD(RATE), losses, **kwargs)


@contextlib.contextmanager
def in_float64():
    """Context in which models are made and trained in float64.

    On JAX and torch, Keras promotes float64 to float32 in most operations;
    not in this context.
    """
    before = keras.config.floatx(), keras.config.dtype_policy()
    promoted = dtypes.BIT64_TO_BIT32_DTYPE["float64"]
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    # Keras keeps the policy of the first layer that was made.
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = promoted
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def numbers(structure):
    """Returns the float arrays of a structure."""
    found = [np.asarray(leaf) for leaf in keras.tree.flatten(structure)]
    return [array for array in found if array.dtype.kind == "f"]


def run(build, spec, weights=None, steps=1):
    """Returns a model, a batch, targets, its outputs before and after training.

    Last are the weights at first.
    """
    keras.utils.set_random_seed(3)
    model = build()
    if weights is None:
        weights = model.get_weights()
    else:
        model.set_weights(weights)
    x = inputs_of(model, spec)
    before = model.predict_on_batch(x)
    targets = keras.tree.map_structure(np.zeros_like, before)
    compile_model(model)
    for _ in range(steps):
        model.train_on_batch(x, targets)
    after = model.predict_on_batch(x)
    return (model, x, targets), before, after, weights


def difference(name, mesh, steps):
    """Returns by how much a split model differs from one device, trained.

    The largest difference of an output, as a part of its largest number.
    """
    builders, specs, _ = survey()
    build, spec = builders[name], specs.get(name)
    *_, expected, weights = run(build, spec, steps=steps)
    plan = plan_of(name, mesh)
    with distribution.TensorParallel(plan=plan, strict=False).scope():
        *_, found, _ = run(build, spec, weights, steps)
    return largest_difference(found, expected)


def moved_by_rounding(name, steps):
    """Returns how far a model on one device moves by rounding alone, trained.

    As the difference of a model whose weights are changed by one unit in their
    last place, each up or down.
    """
    builders, specs, _ = survey()
    build, spec = builders[name], specs.get(name)
    *_, expected, weights = run(build, spec, steps=steps)
    rng = np.random.default_rng(0)

    def moved(array):
        if array.dtype.kind != "f":
            return array
        up = rng.choice([False, True], array.shape)
        return np.nextafter(
            array, np.where(up, np.inf, -np.inf), dtype=array.dtype
        )

    *_, found, _ = run(build, spec, [moved(w) for w in weights], steps)
    return largest_difference(found, expected)


def largest_difference(found, expected):
    """Returns the largest difference of outputs, as a part of the largest."""
    return max(
        float(np.abs(a - b).max() / (np.abs(b).max() or 1.0))
        for a, b in zip(numbers(found), numbers(expected), strict=True)
    )


def plan_of(name, mesh):
    """Returns the plan of a model, whose layers are numbered from 0."""
    builders, specs, least_gathered = survey()
    # Layers without a name are numbered: the plan and the model alike.
    keras.utils.clear_session()
    return distribution.plan_sharding(
        builders[name], mesh, specs.get(name), gather_outputs=least_gathered
    )


def mesh_size(plan):
    """Returns the number of devices of a plan."""
    return math.prod(plan.device_mesh.shape)


def predicted(plan, outputs):
    """Returns the collectives of a plan and of the loss, by kind.

    The mean of a split output, along its last dim, is one more all-reduce.

    Args:
        plan: `ShardingPlan`.
        outputs: Structure of arrays or tensors of known shapes, what the model
            returns for a batch of `BATCH` and `hub_models.LENGTH`.

    Returns:
        Dict of each kind that is there to `(count, bytes)`.
    """
    found = plan.collectives(BATCH, hub_models.LENGTH)
    count, size = found["all_reduce"]
    shapes = [tuple(leaf.shape) for leaf in keras.tree.flatten(outputs)]
    for of_output in plan.split_outputs:
        items = of_output.at(BATCH, hub_models.LENGTH) // 4
        shape = next(s for s in shapes if math.prod(s) == items)
        count, size = count + 1, size + 4 * items // shape[-1]
    if keras.config.backend() == "tensorflow":
        # Without a reduce-scatter, as on CPUs, DTensor sums all of it.
        scattered, part = found.pop("reduce_scatter", (0, 0))
        count, size = count + scattered, size + part * mesh_size(plan)
    found["all_reduce"] = count, size
    return {kind: pair for kind, pair in found.items() if pair[0]}


def reasons(plan):
    """Returns why a plan says that it does not predict all collectives."""
    instead = f"{len(plan.instead)} variables are laid out in another way here"
    return [
        *[instead] * bool(plan.instead),
        *(f"{kind} has no rule" for kind in plan.without_rule),
        *(row.why for row in plan.variables if not row.is_predicted),
    ]
