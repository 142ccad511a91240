"""Functions of Keras that a backend computes whole, or refuses, and why.

Names are those of `ops_cases.public_functions`, of layers and of losses, with
the prefixes `layers.` and `losses.`. "split" is what the others are.
"""

# Each device holds more than its part of the result, for a split of one input.
# On JAX, XLA decides that for each program: it is not listed.
WHOLE = {
    "jax": {},
    "tensorflow": {
        "needs all of a dim, and DTensor gathers the others with it": (
            "argsort",
            "cumsum",
            "diff",
            "extract_sequences",
            "flip",
            "fliplr",
            "flipud",
            "istft",
            "layers.MelSpectrogram",
            "layers.STFTSpectrogram",
            "nancumsum",
            "random.shuffle",
            "roll",
            "rot90",
            "sort",
            "stft",
            "take",
        ),
        "what is joined along a split dim has no parts of equal size": (
            "append",
            "concatenate",
            "hstack",
            "vstack",
        ),
        "DTensor replicates what it has no expansion of its own for": (
            "associative_scan",
            "convert_to_numpy",
            "corrcoef",
            "correlate",
            "isin",
            "jvp",
            "kron",
            "meshgrid",
            "multi_hot",
            "pad",
            "ravel",
            "repeat",
            "reshape",
            "scatter",
            "scatter_update",
            "segment_sum",
        ),
        "made of a shape: nothing says how to split it": (
            "full_like",
            "imag",
            "isreal",
            "ones_like",
            "zeros_like",
        ),
        "windows cross the borders of parts": (
            "average_pool",
            "depthwise_conv",
            "image.gaussian_blur",
            "max_pool",
        ),
        "every pixel may come from any other": (
            "image.affine_transform",
            "image.elastic_transform",
            "image.map_coordinates",
            "image.pad_images",
            "image.perspective_transform",
            "image.resize",
            "image.scale_and_translate",
            "layers.ContrastLimitedAdaptiveHistogramEqualization",
            "layers.RandomRotation",
            "layers.RandomShear",
            "layers.RandomTranslation",
            "layers.RandomZoom",
            "layers.Resizing",
        ),
        "counted along a split dim: each device has the sum": (
            "histogram",
            "layers.CategoryEncoding",
            "searchsorted",
        ),
        "what is written is split, and not what it is written into": (
            "slice_update",
        ),
        "DTensor sums parts up, or gathers them, as it estimates the cost": (
            "dot",
            "dot_product_attention",
            "einsum",
        ),
    },
    "torch": {
        "a sort, running sum, transform or lookup needs all of a dim": (
            "argsort",
            "associative_scan",
            "cumprod",
            "cumsum",
            "diff",
            "digitize",
            "extract_sequences",
            "fft",
            "fft2",
            "flip",
            "fliplr",
            "flipud",
            "ifft2",
            "irfft",
            "istft",
            "layers.Discretization",
            "layers.MelSpectrogram",
            "layers.STFTSpectrogram",
            "nancumprod",
            "nancumsum",
            "random.shuffle",
            "rfft",
            "roll",
            "rot90",
            "searchsorted",
            "sort",
            "stft",
            "take",
            "tril",
            "triu",
        ),
        "torch has no sharding strategy for it, or a wrong one": (
            "bincount",
            "convert_to_numpy",
            "correlate",
            "diag",
            "diagflat",
            "fold",
            "full_like",
            "histogram",
            "image.pad_images",
            "jvp",
            "layers.CategoryEncoding",
            "map",
            "meshgrid",
            "multi_hot",
            "nonzero",
            "pad",
            "repeat",
            "scan",
            "scatter",
            "scatter_update",
            "segment_max",
            "segment_min",
            "segment_prod",
            "segment_sum",
            "slice_update",
            "space_to_depth",
            "tile",
            "unfold",
            "vander",
            "vectorize",
            "vectorized_map",
        ),
        "a decomposition needs the whole matrix": (
            "cholesky",
            "cholesky_inverse",
            "corrcoef",
            "inv",
            "lu_factor",
            "pinv",
            "qr",
            "svd",
        ),
        "what is joined along a split dim has no parts of equal size": (
            "append",
            "concatenate",
            "hstack",
            "vstack",
        ),
        "windows cross the borders of shards": (
            "average_pool",
            "conv",
            "conv_transpose",
            "depthwise_conv",
            "image.extract_patches",
            "image.extract_patches_3d",
            "image.gaussian_blur",
            "image.sobel_edges",
            "max_pool",
            "separable_conv",
        ),
        "every pixel may come from any other": (
            "image.affine_transform",
            "image.map_coordinates",
            "image.perspective_transform",
            "image.resize",
            "image.scale_and_translate",
            "layers.ContrastLimitedAdaptiveHistogramEqualization",
            "layers.RandomContrast",
            "layers.RandomRotation",
            "layers.RandomShear",
            "layers.RandomTranslation",
            "layers.RandomZoom",
            "layers.Resizing",
        ),
        "DTensor gathers, or an input that is whole decides": (
            "batch_normalization",
            "binary_crossentropy",
            "dot_product_attention",
            "einsum",
            "layer_normalization",
        ),
        "one draw for all processes": (
            "random.beta",
            "random.binomial",
            "random.gamma",
        ),
    },
}

# An error names the operation.
REFUSED = {
    "jax": {},
    "tensorflow": {
        "DTensor has no expansion of a decomposition": (
            "cholesky",
            "cholesky_inverse",
            "det",
            "eig",
            "eigh",
            "inv",
            "logdet",
            "lstsq",
            "matrix_rank",
            "norm",
            "pinv",
            "qr",
            "slogdet",
            "solve",
            "solve_triangular",
            "svd",
        ),
        "DTensor has no expansion of a change of an image's geometry": (
            "depth_to_space",
            "fold",
            "image.sobel_edges",
            "layers.RandomPerspective",
            "space_to_depth",
            "unfold",
        ),
        "DTensor has no layout for the lists of a loop": (
            "fori_loop",
            "map",
            "scan",
            "while_loop",
        ),
        "DTensor has no expansion": (
            "bincount",
            "cross",
            "ctc_decode",
            "cumprod",
            "i0",
            "layers.Equalization",
            "layers.RandAugment",
            "nancumprod",
            "nanprod",
            "prod",
            "segment_max",
            "segment_min",
            "segment_prod",
            "tile",
        ),
        "keras_tp has a rule for the main diagonal only": (
            "diag",
            "diagonal",
        ),
        "DTensor cannot move, join or broadcast these splits": (
            "losses.CategoricalHinge",
            "ifft2",
            "image.ssim",
            "layer_normalization",
            "layers.RandomElasticTransform",
            "slice_update",
        ),
        "its shape follows from values, or it runs eagerly only": (
            "argpartition",
            "nonzero",
            "unique",
        ),
        "the numbers would depend on the mesh": (
            "layers.AugMix",
            "random.beta",
            "random.binomial",
            "random.gamma",
        ),
    },
    "torch": {},
}

# Keras refuses the inputs that other backends take, on one device too.
NOT_THERE = {
    "jax": {},
    "tensorflow": {
        "TensorFlow cannot compile it, and it does not run eagerly either": (
            "lu_factor",
            "vectorize",
        ),
    },
    "torch": {
        "torch has it for other ranks or dtypes only": (
            "cross",
            "dot",
            "imag",
            "vdot",
        ),
    },
}

# Random numbers that are alike on all meshes, but not those of one device.
DRAWN = {
    "jax": {},
    "tensorflow": {
        "TensorFlow's generator is not the one that draws on one device": (
            "random.categorical",
        ),
    },
    "torch": {},
}

# Defects that are not mended yet: the error is not clear.
OPEN = {
    "jax": {},
    "tensorflow": {},
    "torch": {},
}


def reason(table, backend, name):
    """Returns why a function stands in a table; `None` if it does not."""
    for why, names in table[backend].items():
        if name in names:
            return why
    return None
