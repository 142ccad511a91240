"""Sessions of a user: a model is changed, copied and trained again.

Nothing in them mentions a mesh.

Each function of `RECIPES` returns the numbers that a run shows.
"""

import copy
import pickle

import keras
import numpy as np
from keras import layers
from keras import ops

from integration_tests.recipes import _fit
from integration_tests.recipes import _flat
from integration_tests.recipes import _integers
from integration_tests.recipes import _numbers

X, Y = _numbers((16, 12)), _numbers((16, 4), 1)


def _sequential():
    """Returns a model that has no `Input`."""
    return keras.Sequential(
        [layers.Dense(16, "relu", name="up"), layers.Dense(4, name="down")]
    )


def _functional():
    inputs = keras.Input((12,))
    x = layers.Dense(16, "relu", name="up")(inputs)
    return keras.Model(inputs, layers.Dense(4, name="down")(x))


def _compiled(model, optimizer=None, **kwargs):
    # A small epsilon would make a step of a gradient that is rounding alone.
    optimizer = optimizer or keras.optimizers.Adam(0.01, epsilon=1e-3)
    model.compile(optimizer, kwargs.pop("loss", "mse"), **kwargs)
    return model


def _trained(model, y=Y, **kwargs):
    return _fit(model, X, y, **kwargs)


def layers_added_and_removed():
    model = _compiled(_sequential())
    found = _trained(model)
    model.add(layers.Dense(8, "relu", name="more"))
    model.add(layers.Dense(4, name="last"))
    found += _trained(_compiled(model))
    model.pop()
    model.add(layers.Dense(2, name="other"))
    return found + _trained(_compiled(model), Y[:, :2])


def copies():
    """Of a trained model, made in each way; the copies train on."""
    model = _compiled(_functional())
    found = _trained(model)
    pickled = pickle.loads(pickle.dumps(model))
    found += _trained(pickled)
    found += _flat(copy.deepcopy(model)(X))
    cloned = keras.models.clone_model(model)
    restored = keras.Model.from_config(model.get_config())
    for other in (cloned, restored):
        other.set_weights(model.get_weights())
        found += _trained(_compiled(other))
    return found


def copies_of_a_model_without_input():
    model = _compiled(_sequential())
    found = _trained(model)
    found += _trained(pickle.loads(pickle.dumps(model)))
    read = keras.models.model_from_json(model.to_json())
    read(X[:4])
    read.set_weights(model.get_weights())
    return found + _trained(_compiled(read))


def state_trees():
    # Of another name, Keras skips the state of the optimizer.
    model, other = (
        _compiled(
            _functional(),
            keras.optimizers.Adam(0.01, epsilon=1e-3, name="adam"),
        )
        for _ in range(2)
    )
    found = _trained(model) + _trained(other, epochs=1)
    tree = model.get_state_tree(value_format="numpy_array")
    other.set_state_tree(tree)
    return found + _trained(other)


def settings_between_two_fits():
    model = _compiled(_functional())
    found = _trained(model)
    model.optimizer.learning_rate = 0.1
    found += _trained(model)
    model.optimizer.learning_rate.assign(0.001)
    found += _trained(model, batch_size=5)
    model.layers[1].trainable = False
    found += _trained(_compiled(model, keras.optimizers.SGD(0.1, 0.9)))
    model.layers[1].trainable = True
    return found + _trained(_compiled(model), batch_size=16)


def weights_changed_between_two_fits():
    model = _compiled(_functional())
    found = _trained(model)
    model.set_weights([value * 0.5 for value in model.get_weights()])
    first = model.layers[1]
    first.set_weights([value * 2 for value in first.get_weights()])
    found += _trained(model)
    first.kernel.assign(first.kernel * 0.9)
    first.bias.assign_add(np.ones(16, "float32"))
    return found + _trained(model)


def averaged_models():
    """A running average of weights, and the mean of two models."""
    model, other = _compiled(_functional()), _functional()
    average = _functional()
    average.set_weights(model.get_weights())
    found = []
    for _ in range(2):
        found += _trained(model, epochs=1)
        pairs = zip(model.trainable_variables, average.trainable_variables)
        for new, mean in pairs:
            mean.assign(0.9 * mean + 0.1 * new)
    pairs = zip(model.get_weights(), average.get_weights())
    other.set_weights([(a + b) / 2 for a, b in pairs])
    for variable, value in zip(average.weights, model.weights):
        variable.assign(ops.convert_to_numpy(value) * 0.5)
    return found + _flat(average(X), other.predict(X, verbose=0))


def parts_of_models():
    """A model of the middle, one in another, and a trunk with two heads."""
    body = _compiled(_functional())
    found = _trained(body)
    middle = keras.Model(body.input, body.layers[1].output)
    found += _flat(middle.predict(X, verbose=0))
    inputs = keras.Input((12,))
    outer = keras.Model(inputs, layers.Dense(2, name="head")(body(inputs)))
    found += _trained(_compiled(outer), Y[:, :2])
    heads = [
        _compiled(keras.Model(inputs, layers.Dense(4, name=name)(x)))
        for x in [middle(inputs)]
        for name in ("left", "right")
    ]
    for head in heads * 2:
        found += _trained(head)
    return found + _flat(body(X))


class Shrinking(keras.callbacks.Callback):
    """Changes a weight, reads all of them, and predicts, while `fit` runs."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def on_train_batch_end(self, batch, logs=None):
        squares = [ops.square(w) for w in self.model.trainable_weights]
        self.found.append(sum(float(ops.sum(x)) for x in squares))

    def on_epoch_end(self, epoch, logs=None):
        kernel = self.model.layers[-1].kernel
        kernel.assign(kernel * 0.9)
        self.found.extend(_flat(self.model.predict(X[:4], verbose=0)))


def callbacks_that_read_and_write():
    read = []
    found = _trained(_compiled(_functional()), callbacks=[Shrinking(read)])
    model = _compiled(_functional())
    found += _trained(
        model,
        epochs=3,
        callbacks=[
            keras.callbacks.EarlyStopping(
                "loss", min_delta=10, patience=1, restore_best_weights=True
            ),
            keras.callbacks.ReduceLROnPlateau("loss", min_delta=10, patience=1),
        ],
    )
    return found + read + _flat(model.optimizer.learning_rate, model(X))


def adapters_and_small_integers():
    """LoRA, and then `int8`, of a model that was trained."""
    model = _compiled(_functional())
    found = _trained(model)
    model.layers[1].enable_lora(2)
    found += _trained(_compiled(model))
    model.quantize("int8")
    return found + _flat(model.predict(X, verbose=0))


def numbers_of_weights():
    model = _compiled(_functional())
    found = _trained(model)
    kernel = model.layers[1].kernel
    found += [
        float(ops.sum(kernel)),
        float(ops.max(kernel)),
        float(ops.mean(ops.square(kernel))),
        kernel.shape[0],
        len(kernel.shape),
    ]
    found += _flat(np.asarray(kernel)[:2], kernel[0][:3], kernel[-1, ::2])
    table = keras.Sequential(
        [layers.Embedding(16, 8), layers.Flatten(), layers.Dense(4)]
    )
    # Adam on TensorFlow squares the parts of a row that is looked up twice.
    table.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    found += _fit(table, _integers(16, (16, 6)), Y)
    return found + _flat(table.layers[0].embeddings[3:5])


class Shifted(layers.Layer):
    """Uses tensors that are no weights: its own, and one from outside."""

    shift = np.linspace(-1, 1, 12, dtype="float32")

    def __init__(self):
        super().__init__()
        self.scale = ops.convert_to_tensor(self.shift + 2)
        self.signs = [ops.sign(self.scale), ops.ones((12,))]

    def call(self, inputs):
        x = ops.concatenate([inputs * self.scale, inputs - self.shift], -1)
        x = x * ops.concatenate(self.signs)
        return ops.subtract(ops.reshape(x, (-1, 8, 3)), [0.229, 0.224, 0.225])


def tensors_that_are_no_weights():
    """Called before and after `fit`, and adapted again."""
    normalize = layers.Normalization()
    normalize.adapt(X)
    model = keras.Sequential(
        [normalize, Shifted(), layers.Flatten(), layers.Dense(4)]
    )
    found = _flat(model(X))
    found += _trained(_compiled(model)) + _flat(model(X))
    normalize.adapt(X * 2)
    return found + _flat(model(X))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        part = slice(4 * index, 4 * index + 4)
        return X[part], Y[part]


def data_of_each_kind():
    """Generators, `PyDataset`, single batches, and parts of arrays."""
    model = _compiled(_sequential())
    found = _fit(model, Batches(), batch_size=None)
    batches = Batches()
    generator = (batches[i] for i in range(4))
    # A step that finds no batch counts for Keras's optimizer on TensorFlow.
    found += _fit(
        model, generator, batch_size=None, epochs=1, steps_per_epoch=4
    )
    found += _trained(model, validation_split=0.25)
    found += _flat([model.train_on_batch(X, Y) for _ in range(2)])
    found += _flat(model.test_on_batch(X, Y), model.predict_on_batch(X))
    found += _flat(model.evaluate(X, Y, batch_size=6, verbose=0))
    return found + _flat(model.predict(X, batch_size=7, verbose=0))


def weighted_samples():
    model = _compiled(
        _functional(),
        metrics=["mae", keras.metrics.RootMeanSquaredError()],
        weighted_metrics=["mse"],
    )
    weights = np.arange(16, dtype="float32") / 16
    return _trained(model, sample_weight=weights, validation_data=(X, Y))


class Penalty(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.01 * ops.sum(ops.square(inputs)))
        return inputs


def penalties():
    """Regularizers, constraints, losses of layers, and a scaled loss."""
    model = keras.Sequential(
        [
            layers.Dense(16, kernel_regularizer="l2", bias_regularizer="l1"),
            Penalty(),
            layers.Dense(
                4, kernel_constraint="max_norm", activity_regularizer="l2"
            ),
        ]
    )
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, clipnorm=0.5, use_ema=True)
    )
    return _trained(_compiled(model, optimizer)) + _flat(model(X))


RECIPES = {
    function.__name__: function
    for function in (
        layers_added_and_removed,
        copies,
        copies_of_a_model_without_input,
        state_trees,
        settings_between_two_fits,
        weights_changed_between_two_fits,
        averaged_models,
        parts_of_models,
        callbacks_that_read_and_write,
        adapters_and_small_integers,
        numbers_of_weights,
        tensors_that_are_no_weights,
        data_of_each_kind,
        weighted_samples,
        penalties,
    )
}
