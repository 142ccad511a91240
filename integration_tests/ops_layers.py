"""Layers and losses of Keras, and what they are tried on."""

import keras
import numpy as np
from keras import layers

from integration_tests.ops_inputs import between
from integration_tests.ops_inputs import integers
from integration_tests.ops_inputs import numbers

ROWS = (8,)
SEQUENCE = (6, 8)
IMAGE = (8, 6, 4)
VOLUME = (4, 6, 8, 2)
PICTURES = between(0.1, 0.9, 2, 8, 6, 4)
COLORS = between(0.1, 0.9, 2, 8, 6, 3)


class Attended(layers.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        if isinstance(
            self.inner,
            (layers.MultiHeadAttention, layers.GroupQueryAttention),
        ):
            self.inner.build(shape, shape)
        else:
            self.inner.build([shape, shape])

    def call(self, x):
        if hasattr(self.inner, "num_query_heads") or isinstance(
            self.inner, layers.MultiHeadAttention
        ):
            return self.inner(x, x)
        return self.inner([x, x])


class Merged(layers.Layer):
    """Gives a layer its input, and what is made of it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner([x, x * x + 1])


# Trained behind a layer whose outputs are split: shape of that, and the layer.
# The weights of the layer are split too, if it has some.
TRAINED = {
    "Activation": (ROWS, lambda: layers.Activation("gelu")),
    "ActivityRegularization": (
        ROWS,
        lambda: layers.ActivityRegularization(0.01, 0.02),
    ),
    "AdaptiveAveragePooling1D": (
        SEQUENCE,
        lambda: layers.AdaptiveAveragePooling1D(4),
    ),
    "AdaptiveAveragePooling2D": (
        IMAGE,
        lambda: layers.AdaptiveAveragePooling2D((3, 2)),
    ),
    "AdaptiveAveragePooling3D": (
        VOLUME,
        lambda: layers.AdaptiveAveragePooling3D(2),
    ),
    "AdaptiveMaxPooling1D": (
        SEQUENCE,
        lambda: layers.AdaptiveMaxPooling1D(4),
    ),
    "AdaptiveMaxPooling2D": (
        IMAGE,
        lambda: layers.AdaptiveMaxPooling2D((3, 2)),
    ),
    "AdaptiveMaxPooling3D": (
        VOLUME,
        lambda: layers.AdaptiveMaxPooling3D(2),
    ),
    "Add": (ROWS, lambda: Merged(layers.Add())),
    "AdditiveAttention": (
        SEQUENCE,
        lambda: Attended(layers.AdditiveAttention()),
    ),
    "AlphaDropout": (SEQUENCE, lambda: layers.AlphaDropout(0.4, seed=1)),
    "Attention": (
        SEQUENCE,
        lambda: Attended(layers.Attention(use_scale=True)),
    ),
    "Average": (ROWS, lambda: Merged(layers.Average())),
    "AveragePooling1D": (SEQUENCE, lambda: layers.AveragePooling1D(2)),
    "AveragePooling2D": (IMAGE, lambda: layers.AveragePooling2D((3, 2))),
    "AveragePooling3D": (VOLUME, lambda: layers.AveragePooling3D(2)),
    "BatchNormalization": (IMAGE, lambda: layers.BatchNormalization()),
    "Bidirectional": (
        SEQUENCE,
        lambda: layers.Bidirectional(layers.LSTM(4)),
    ),
    "Concatenate": (SEQUENCE, lambda: Merged(layers.Concatenate())),
    "Conv1D": (SEQUENCE, lambda: layers.Conv1D(4, 2)),
    "Conv1DTranspose": (SEQUENCE, lambda: layers.Conv1DTranspose(4, 2)),
    "Conv2D": (IMAGE, lambda: layers.Conv2D(6, 2, padding="same")),
    "Conv2DTranspose": (
        IMAGE,
        lambda: layers.Conv2DTranspose(6, 2, strides=2),
    ),
    "Conv3D": (VOLUME, lambda: layers.Conv3D(4, 2)),
    "Conv3DTranspose": (VOLUME, lambda: layers.Conv3DTranspose(4, 2)),
    "ConvLSTM1D": ((4, 6, 2), lambda: layers.ConvLSTM1D(4, 2)),
    "ConvLSTM2D": ((2, 6, 4, 2), lambda: layers.ConvLSTM2D(4, 2)),
    "ConvLSTM3D": ((2, 4, 4, 4, 2), lambda: layers.ConvLSTM3D(4, 2)),
    "Cropping1D": (SEQUENCE, lambda: layers.Cropping1D(1)),
    "Cropping2D": (IMAGE, lambda: layers.Cropping2D(1)),
    "Cropping3D": (VOLUME, lambda: layers.Cropping3D(1)),
    "Dense": (SEQUENCE, lambda: layers.Dense(4)),
    "DepthwiseConv1D": (SEQUENCE, lambda: layers.DepthwiseConv1D(2)),
    "DepthwiseConv2D": (
        IMAGE,
        lambda: layers.DepthwiseConv2D(2, depth_multiplier=2),
    ),
    "Dot": (SEQUENCE, lambda: Merged(layers.Dot(2))),
    "Dropout": (SEQUENCE, lambda: layers.Dropout(0.4, seed=1)),
    "ELU": (ROWS, lambda: layers.ELU()),
    "EinsumDense": (
        SEQUENCE,
        lambda: layers.EinsumDense(
            "abc,cde->abde", (None, 2, 4), bias_axes="de"
        ),
    ),
    "Flatten": (IMAGE, lambda: layers.Flatten()),
    "GRU": (SEQUENCE, lambda: layers.GRU(4, return_sequences=True)),
    "GaussianDropout": (SEQUENCE, lambda: layers.GaussianDropout(0.4, seed=1)),
    "GaussianNoise": (SEQUENCE, lambda: layers.GaussianNoise(0.4, seed=1)),
    "GlobalAveragePooling1D": (
        SEQUENCE,
        lambda: layers.GlobalAveragePooling1D(),
    ),
    "GlobalAveragePooling2D": (IMAGE, lambda: layers.GlobalAveragePooling2D()),
    "GlobalAveragePooling3D": (
        VOLUME,
        lambda: layers.GlobalAveragePooling3D(),
    ),
    "GlobalMaxPooling1D": (SEQUENCE, lambda: layers.GlobalMaxPooling1D()),
    "GlobalMaxPooling2D": (IMAGE, lambda: layers.GlobalMaxPooling2D()),
    "GlobalMaxPooling3D": (VOLUME, lambda: layers.GlobalMaxPooling3D()),
    "GroupNormalization": (IMAGE, lambda: layers.GroupNormalization(2)),
    "GroupQueryAttention": (
        SEQUENCE,
        lambda: Attended(layers.GroupQueryAttention(4, 4, 2)),
    ),
    "Identity": (ROWS, lambda: layers.Identity()),
    "LSTM": (SEQUENCE, lambda: layers.LSTM(4, return_sequences=True)),
    "Lambda": (ROWS, lambda: layers.Lambda(lambda x: x * 2 + x[:1])),
    "LayerNormalization": (SEQUENCE, lambda: layers.LayerNormalization()),
    "LeakyReLU": (ROWS, lambda: layers.LeakyReLU()),
    "Masking": (SEQUENCE, lambda: layers.Masking()),
    "MaxPooling1D": (SEQUENCE, lambda: layers.MaxPooling1D(2)),
    "MaxPooling2D": (IMAGE, lambda: layers.MaxPooling2D(2, padding="same")),
    "MaxPooling3D": (VOLUME, lambda: layers.MaxPooling3D(2)),
    "Maximum": (ROWS, lambda: Merged(layers.Maximum())),
    "Minimum": (ROWS, lambda: Merged(layers.Minimum())),
    "MultiHeadAttention": (
        SEQUENCE,
        lambda: Attended(layers.MultiHeadAttention(2, 4)),
    ),
    "Multiply": (ROWS, lambda: Merged(layers.Multiply())),
    "Normalization": (
        ROWS,
        lambda: layers.Normalization(
            mean=np.arange(8.0), variance=np.arange(1.0, 9.0)
        ),
    ),
    "PReLU": (SEQUENCE, lambda: layers.PReLU()),
    "Permute": (IMAGE, lambda: layers.Permute((3, 1, 2))),
    "RMSNormalization": (SEQUENCE, lambda: layers.RMSNormalization()),
    "RNN": (
        SEQUENCE,
        lambda: layers.RNN([layers.GRUCell(4), layers.LSTMCell(6)]),
    ),
    "ReLU": (ROWS, lambda: layers.ReLU(1.0, 0.2, 0.1)),
    "RepeatVector": (ROWS, lambda: layers.RepeatVector(4)),
    "Rescaling": (ROWS, lambda: layers.Rescaling(2.0, 1.0)),
    "Reshape": (SEQUENCE, lambda: layers.Reshape((8, 6))),
    "SeparableConv1D": (SEQUENCE, lambda: layers.SeparableConv1D(4, 2)),
    "SeparableConv2D": (IMAGE, lambda: layers.SeparableConv2D(6, 2)),
    "SimpleRNN": (SEQUENCE, lambda: layers.SimpleRNN(4, return_sequences=True)),
    "Softmax": (SEQUENCE, lambda: layers.Softmax()),
    "SpatialDropout1D": (
        SEQUENCE,
        lambda: layers.SpatialDropout1D(0.4, seed=1),
    ),
    "SpatialDropout2D": (IMAGE, lambda: layers.SpatialDropout2D(0.4, seed=1)),
    "SpatialDropout3D": (VOLUME, lambda: layers.SpatialDropout3D(0.4, seed=1)),
    "SpectralNormalization": (
        SEQUENCE,
        lambda: layers.SpectralNormalization(layers.Dense(4)),
    ),
    "Subtract": (ROWS, lambda: Merged(layers.Subtract())),
    "TimeDistributed": (
        SEQUENCE,
        lambda: layers.TimeDistributed(layers.Dense(4)),
    ),
    "UnitNormalization": (SEQUENCE, lambda: layers.UnitNormalization()),
    "UpSampling1D": (SEQUENCE, lambda: layers.UpSampling1D(2)),
    "UpSampling2D": (IMAGE, lambda: layers.UpSampling2D(2)),
    "UpSampling3D": (VOLUME, lambda: layers.UpSampling3D(2)),
    "ZeroPadding1D": (SEQUENCE, lambda: layers.ZeroPadding1D(1)),
    "ZeroPadding2D": (IMAGE, lambda: layers.ZeroPadding2D(1)),
    "ZeroPadding3D": (VOLUME, lambda: layers.ZeroPadding3D(1)),
}

# Trained on ids: the number of ids in a row, and the layer.
OF_IDS = {
    "Embedding": (6, lambda: layers.Embedding(12, 4)),
    "ReversibleEmbedding": (6, lambda: layers.ReversibleEmbedding(12, 4)),
}

# Called with images, as a model that starts with them does.
IMAGES_CHANGED = {
    "AugMix": lambda: layers.AugMix(value_range=(0, 1), seed=3),
    "AutoContrast": lambda: layers.AutoContrast(value_range=(0, 1)),
    "CenterCrop": lambda: layers.CenterCrop(4, 2),
    "ContrastLimitedAdaptiveHistogramEqualization": lambda: (
        layers.ContrastLimitedAdaptiveHistogramEqualization(value_range=(0, 1))
    ),
    "Equalization": lambda: layers.Equalization(value_range=(0, 1)),
    "RandAugment": lambda: layers.RandAugment(value_range=(0, 1), seed=3),
    "RandomBrightness": lambda: layers.RandomBrightness(
        0.3, value_range=(0, 1), seed=3
    ),
    "RandomColorDegeneration": lambda: layers.RandomColorDegeneration(
        0.5, value_range=(0, 1), seed=3
    ),
    "RandomColorJitter": lambda: layers.RandomColorJitter(
        value_range=(0, 1), brightness_factor=0.2, seed=3
    ),
    "RandomContrast": lambda: layers.RandomContrast(
        0.3, value_range=(0, 1), seed=3
    ),
    "RandomCrop": lambda: layers.RandomCrop(4, 4, seed=3),
    "RandomElasticTransform": lambda: layers.RandomElasticTransform(
        value_range=(0, 1), seed=3
    ),
    "RandomErasing": lambda: layers.RandomErasing(value_range=(0, 1), seed=3),
    "RandomFlip": lambda: layers.RandomFlip(seed=3),
    "RandomGaussianBlur": lambda: layers.RandomGaussianBlur(
        value_range=(0, 1), seed=3
    ),
    "RandomGrayscale": lambda: layers.RandomGrayscale(0.5, seed=3),
    "RandomHue": lambda: layers.RandomHue(0.3, value_range=(0, 1), seed=3),
    "RandomInvert": lambda: layers.RandomInvert(value_range=(0, 1), seed=3),
    "RandomPerspective": lambda: layers.RandomPerspective(seed=3),
    "RandomPosterization": lambda: layers.RandomPosterization(
        4, value_range=(0, 1), seed=3
    ),
    "RandomRotation": lambda: layers.RandomRotation(0.2, seed=3),
    "RandomSaturation": lambda: layers.RandomSaturation(
        0.3, value_range=(0, 1), seed=3
    ),
    "RandomSharpness": lambda: layers.RandomSharpness(
        0.5, value_range=(0, 1), seed=3
    ),
    "RandomShear": lambda: layers.RandomShear(0.3, 0.3, seed=3),
    "RandomTranslation": lambda: layers.RandomTranslation(0.2, 0.2, seed=3),
    "RandomZoom": lambda: layers.RandomZoom(0.2, seed=3),
    "Resizing": lambda: layers.Resizing(4, 10),
    "Solarization": lambda: layers.Solarization(value_range=(0, 1), seed=3),
}

# Called with other values.
CALLED = {
    "CategoryEncoding": (
        lambda: layers.CategoryEncoding(8, output_mode="multi_hot"),
        integers(0, 8, 4, 6),
    ),
    "Discretization": (
        lambda: layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0]),
        numbers(4, 6),
    ),
    "MelSpectrogram": (
        lambda: layers.MelSpectrogram(
            fft_length=16, sequence_stride=8, num_mel_bins=4
        ),
        numbers(4, 64),
    ),
    "STFTSpectrogram": (
        lambda: layers.STFTSpectrogram(
            frame_length=16, frame_step=8, fft_length=16
        ),
        numbers(4, 64, 2),
    ),
}

NOT_TRIED = {
    "has no computation of its own": (
        "InputLayer",
        "InputSpec",
        "Layer",
        "Pipeline",
        "Wrapper",
    ),
    "is a step of a recurrent layer, which is tried": (
        "GRUCell",
        "LSTMCell",
        "SimpleRNNCell",
        "StackedRNNCells",
    ),
    "holds a model of one framework, which has no layouts": (
        "FlaxLayer",
        "JaxLayer",
        "TFSMLayer",
        "TorchModuleWrapper",
    ),
    "looks up or hashes values with TensorFlow on the host": (
        "HashedCrossing",
        "Hashing",
        "IntegerLookup",
        "StringLookup",
        "TextVectorization",
    ),
    "takes dicts of images and labels, or of bounding boxes, in a data "
    "pipeline": ("CutMix", "MaxNumBoundingBoxes", "MixUp"),
}


def model(name):
    """Returns a small model with a layer of `TRAINED` or `OF_IDS` in it."""
    if name in OF_IDS:
        size, make = OF_IDS[name]
        return keras.Sequential(
            [keras.Input((size,), dtype="int32"), make(), layers.Dense(4)]
        )
    shape, make = TRAINED[name]
    up = layers.Dense(shape[-1], name="up")
    return keras.Sequential([keras.Input((*shape[:-1], 3)), up, make()])


def public_layers():
    """Returns the names of Keras's layers, each class by one name."""
    found = {}
    for name in dir(keras.layers):
        value = getattr(keras.layers, name)
        if isinstance(value, type):
            found.setdefault(value, name)
            if value.__name__ == name:
                found[value] = name
    return sorted(found.values())


_LABELS = between(0.1, 0.9, 4, 6)
_PREDICTED = between(0.1, 0.9, 4, 6, seed=1)
_SIGNS = np.sign(numbers(4, 6, seed=4))
_CLASSES = np.eye(6, dtype="float32")[[0, 3, 2, 5]]

# Target and prediction.
LOSSES = {
    **{
        name: (_LABELS, _PREDICTED)
        for name in (
            "BinaryCrossentropy",
            "BinaryFocalCrossentropy",
            "CosineSimilarity",
            "Dice",
            "Huber",
            "KLDivergence",
            "LogCosh",
            "MeanAbsoluteError",
            "MeanAbsolutePercentageError",
            "MeanSquaredError",
            "MeanSquaredLogarithmicError",
            "Poisson",
            "Tversky",
        )
    },
    **{
        name: (_CLASSES, _PREDICTED / _PREDICTED.sum(-1, keepdims=True))
        for name in (
            "CategoricalCrossentropy",
            "CategoricalFocalCrossentropy",
            "CategoricalHinge",
        )
    },
    **{name: (_SIGNS, _PREDICTED * 2) for name in ("Hinge", "SquaredHinge")},
    **{
        name: (
            np.array([0, 3, 2, 5], "int32"),
            _PREDICTED / _PREDICTED.sum(-1, keepdims=True),
        )
        for name in (
            "CategoricalGeneralizedCrossEntropy",
            "SparseCategoricalCrossentropy",
        )
    },
    "Circle": (np.array([0, 1, 0, 1], "int32"), numbers(4, 6)),
    "CTC": (integers(1, 7, 4, 2), numbers(4, 6, 8)),
}


def public_losses():
    """Returns the names of Keras's losses."""
    return sorted(
        name
        for name in dir(keras.losses)
        if isinstance(getattr(keras.losses, name), type) and name != "Loss"
    )
