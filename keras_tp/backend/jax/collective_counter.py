"""Compiles the step of a model, so that its collectives can be counted."""

import jax
from keras.src import backend
from keras.src import tree
from keras.src.backend.jax import trainer as jax_trainer


def compile_step(model, x, y=None):
    """Compiles a model's step as `fit` or `predict` would; runs nothing.

    Args:
        model: A Keras model whose distribution is the current one.
        x: Inputs of one batch.
        y: Targets of the batch. Defaults to `None`: the step of `predict`.

    Returns:
        A `jax.stages.Compiled`.
    """
    data = (x,) if y is None else (x, y)
    data = tree.map_structure(backend.convert_to_numpy, data)
    batch = jax_trainer._distribute_data(data)
    if y is None:
        if not all(layer.built for layer in model._flatten_layers()):
            with backend.StatelessScope():
                model(batch[0])
        state = model._get_jax_state(
            trainable_variables=True, non_trainable_variables=True
        )
        step = jax.jit(model.predict_step)
    else:
        model._symbolic_build(data_batch=batch)
        state = model._get_jax_state(
            trainable_variables=True,
            non_trainable_variables=True,
            optimizer_variables=True,
            metrics_variables=True,
        )
        step = jax.jit(
            model.train_step,
            donate_argnums=0,
            out_shardings=(None, model._get_state_sharding_spec()),
        )
    return step.lower(state, batch).compile()
