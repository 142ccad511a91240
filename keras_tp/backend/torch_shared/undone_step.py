"""One step of a model, which is run and then undone."""

import contextlib

import torch
from keras.src.backend.common import global_state


def prepare(model, x, y):
    """Builds a model, its optimizer and its metrics; returns the data.

    Args:
        model: A Keras model.
        x: Inputs of one batch.
        y: Targets of the batch; `None` for the step of `predict`.

    Returns:
        Tuple: the inputs, and the targets if there are some.
    """
    data = (x,) if y is None else (x, y)
    if y is not None:
        model._symbolic_build(data_batch=data)
    elif not all(layer.built for layer in model._flatten_layers()):
        with torch.no_grad():
            model(x)
    return data


def run(model, batch, counting):
    """Runs one step of a model in a context.

    Args:
        model: A Keras model that is prepared.
        batch: Tuple, as `prepare` returns it, on the devices.
        counting: Context manager, entered around the step only.
    """
    training = model.training
    # XLA runs what it has recorded when the context ends: until then, the
    # outputs have to be kept.
    outputs = []
    with counting:
        if len(batch) == 1:
            model.eval()
            with torch.no_grad():
                outputs.append(model.predict_step(batch))
        else:
            model.train()
            outputs.append(model.train_step(batch))
    model.train(training)


@contextlib.contextmanager
def unchanged(model, local, processes):
    """Restores weights, slots, metrics, gradients and random state.

    Args:
        model: A Keras model.
        local: Callable that returns the tensor that holds a value here.
        processes: The backend's module, for its random state.
    """
    variables = list(model.variables) + list(model.metrics_variables)
    if getattr(model, "optimizer", None) is not None:
        variables += list(model.optimizer.variables)
    generator = global_state.get_global_attribute("global_seed_generator")
    if generator is not None:
        variables.append(generator.state)
    held = [
        (variable, local(variable._value).clone(), variable._value.grad)
        for variable in {id(v): v for v in variables}.values()
    ]
    random_state = processes.random_state()
    try:
        yield
    finally:
        processes.set_random_state(random_state)
        with torch.no_grad():
            for variable, value, gradient in held:
                local(variable._value).copy_(value)
                variable._value.grad = gradient
