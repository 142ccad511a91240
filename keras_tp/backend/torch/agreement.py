"""Processes of one run hold the same model, or all of them stop."""

import hashlib

from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.torch import processes


def check_model(model):
    """Compares a model and its layouts between all processes.

    A collective; values are not compared.

    Args:
        model: A Keras model.

    Raises:
        ValueError: on every process, with the first path that differs.
    """
    current = distribution()
    if current is None or processes.world_size() == 1:
        return
    lines = _described(model, current)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(processes.gather_by_process(digest))) == 1:
        return
    held = processes.gather_by_process(lines)
    count = max(len(lines) for lines in held)
    held = [lines + ["nothing more"] * (count - len(lines)) for lines in held]
    first = next(row for row in zip(*held) if len(set(row)) > 1)
    differing = "; ".join(
        f"{line} in process(es) "
        f"{[index for index, other in enumerate(first) if other == line]}"
        for line in dict.fromkeys(first)
    )
    raise ValueError(
        f"The processes of this run hold different models named "
        f"{model.name!r}, or different layouts for them, and would wait for "
        "each other forever. Build the same layers in the same order, under "
        "the same distribution, in every process: a model that only some of "
        "them build changes the names of later ones. Received, as the first "
        f"difference: {differing}"
    )


def _described(model, current):
    """Returns a line for each thing that has to be the same everywhere."""
    mesh = current.device_mesh
    sizes = ", ".join(f"{a}={n}" for a, n in zip(mesh.axis_names, mesh.shape))
    lines = [
        f"{type(current).__name__} on a mesh of ({sizes}) with devices "
        f"{[str(device) for device in mesh.devices.flatten()]}, batches split "
        f"over {current.batch_dim_name!r}"
    ]
    variables = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
        lines.append(f"optimizer {type(optimizer).__name__}")
    for variable in variables:
        layout = getattr(variable._layout, "axes", variable._layout)
        lines.append(
            f"variable {variable.path!r} of shape {tuple(variable.shape)}, "
            f"{variable.dtype}, layout {layout}"
            f"{'' if variable.trainable else ', not trainable'}"
        )
    return lines
