"""Makes one weights file of a sharded checkpoint."""

import os

import h5py
import numpy as np

from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import file_seal
from keras_tp.backend.saving import tensor_files
from keras_tp.backend.saving.checkpoint_folder import CheckpointFolder

SUFFIX = ".weights.h5"


def consolidate(path, filepath, beside):
    """Writes the tensors of a checkpoint to a weights file, one at a time.

    Args:
        path: String or path of the folder.
        filepath: String or path of the file.
        beside: Tuple of strings. Tensors whose names begin with one of them
            are left out, as Keras's files do not have them.

    Raises:
        UnreadableFileError: if a file is damaged, with its name.
    """
    folder = CheckpointFolder(path)
    with atomic_files.replaced(os.fspath(filepath)) as new:
        with h5py.File(new, "w") as file:
            for name, (shape, dtype) in folder.tensors.items():
                if name.startswith(beside):
                    continue
                whole = tuple((0, size) for size in shape)
                folder.check(name, [whole])
                value = np.empty(shape, tensor_files.numpy_dtype(dtype))
                folder.copy_to(value[...], name, whole)
                group, _, key = name.rpartition("/")
                dataset = file.require_group(group).create_dataset(
                    key, data=value
                )
                if dtype == "bfloat16":
                    # HDF5 has no such dtype. Keras notes it here.
                    dataset.attrs["dtype"] = dtype
                digests.note(dataset, value)
            digests.seal(file)
        file_seal.append(new)
