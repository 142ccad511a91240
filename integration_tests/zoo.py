"""Models to shard, with what is known about them from the theory.

Column and row pairs as in Megatron-LM (Shoeybi et al. 2019, section 3): the
kernel of the first layer is split over its outputs, that of the second over
its inputs. All split dims divide by 2 and by 4, and the dims of a model differ
from each other, so that a mix-up of dims cannot go unnoticed.
"""

import keras
import numpy as np
from keras import layers

BATCH = 4
LENGTH = 6
FEATURES = 12
UNITS = 16
OUTPUTS = 5
VOCABULARY = 24

HUB_LAYERS = 2
HUB_VOCABULARY = 96
HUB_LENGTH = 8
HUB_HIDDEN = 32
HUB_INTERMEDIATE = 64


class Case:
    """One model and what has to come out of sharding it.

    Args:
        build: Callable that returns the model, built.
        data: Callable that is given a random generator and returns inputs and
            targets of one batch.
        layouts: Dict of path pattern to axes.
        split: Collection of the paths of all variables that are split.
        zero_gradient: Collection of the paths of parameters whose true
            gradient is zero: what training does to them is rounding.
        loss: The loss to compile with.
        sgd_rate: Float, learning rate that moves every split variable by 100
            times the tolerance or more in five steps.
        reduces: Boolean. Whether a contraction is split, so that sums are
            rounded in another order than on one device. A vocabulary that is
            split only adds zeros.
    """

    def __init__(
        self,
        build,
        data,
        layouts,
        split,
        zero_gradient=(),
        loss="mse",
        sgd_rate=0.1,
        reduces=True,
    ):
        self.build = build
        self.data = data
        self.layouts = layouts
        self.split = frozenset(split)
        self.zero_gradient = frozenset(zero_gradient)
        self.loss = loss
        self.sgd_rate = sgd_rate
        self.reduces = reduces


def bias():
    """Returns an initializer whose values are random, and not small."""
    return keras.initializers.RandomUniform(-0.5, 0.5)


def dense(units, name, **kwargs):
    return layers.Dense(units, name=name, bias_initializer=bias(), **kwargs)


COLUMN = (None, "model")
ROW = ("model", None)
SPLIT = ("model",)

UP_AND_DOWN = {
    "up/kernel": COLUMN,
    "up/bias": SPLIT,
    "down/kernel": ROW,
}


def mlp():
    inputs = keras.Input((FEATURES,))
    x = dense(UNITS, "up", activation="relu")(inputs)
    return keras.Model(inputs, dense(OUTPUTS, "down")(x), name="mlp")


def conv2d():
    inputs = keras.Input((7, 6, 3))
    x = layers.Conv2D(
        8, 3, activation="relu", bias_initializer=bias(), name="conv_up"
    )(inputs)
    x = layers.Conv2D(
        10, 2, strides=2, bias_initializer=bias(), name="conv_down"
    )(x)
    x = layers.Flatten(name="flatten")(x)
    return keras.Model(inputs, dense(16, "head")(x), name="conv2d")


def recurrent(layer):
    def build():
        inputs = keras.Input((LENGTH, FEATURES))
        x = layer(UNITS, bias_initializer=bias(), name="recurrent")(inputs)
        return keras.Model(inputs, dense(OUTPUTS, "down")(x), name="recur")

    return build


def multi_head_attention():
    inputs = keras.Input((LENGTH, FEATURES))
    x = layers.MultiHeadAttention(
        4, 5, bias_initializer=bias(), name="attention"
    )(inputs, inputs)
    return keras.Model(inputs, dense(OUTPUTS, "head")(x), name="mha")


def grouped_query_attention(key_value_heads):
    def build():
        inputs = keras.Input((LENGTH, FEATURES))
        x = layers.GroupQueryAttention(
            5, 8, key_value_heads, bias_initializer=bias(), name="attention"
        )(inputs, inputs)
        return keras.Model(inputs, dense(OUTPUTS, "head")(x), name="gqa")

    return build


def einsum_dense():
    inputs = keras.Input((LENGTH, FEATURES))
    x = layers.EinsumDense(
        "btd,dhk->bthk",
        (None, 4, 5),
        bias_axes="hk",
        bias_initializer=bias(),
        activation="gelu",
        name="up",
    )(inputs)
    x = layers.EinsumDense(
        "bthk,hkd->btd",
        (None, 7),
        bias_axes="d",
        bias_initializer=bias(),
        name="down",
    )(x)
    return keras.Model(inputs, x, name="einsum")


def embedding():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, UNITS, name="tokens")(inputs)
    return keras.Model(inputs, dense(OUTPUTS, "down")(x), name="embedding")


def batch_normalization():
    inputs = keras.Input((FEATURES,))
    # A bias before a batch normalization has no gradient.
    x = dense(UNITS, "up", use_bias=False)(inputs)
    x = layers.BatchNormalization(
        beta_initializer=bias(), momentum=0.9, name="norm"
    )(x)
    return keras.Model(inputs, dense(OUTPUTS, "down")(x), name="batch_norm")


def layer_normalization():
    inputs = keras.Input((FEATURES,))
    x = dense(UNITS, "up")(inputs)
    x = layers.LayerNormalization(beta_initializer=bias(), name="norm")(x)
    return keras.Model(inputs, dense(OUTPUTS, "down")(x), name="layer_norm")


def dropout():
    inputs = keras.Input((FEATURES,))
    # One mask where all devices hold the whole tensor, one where it is split.
    x = layers.Dropout(0.25, name="whole")(inputs)
    x = dense(UNITS, "up", activation="relu")(x)
    x = layers.Dropout(0.5, name="split")(x)
    return keras.Model(inputs, dense(OUTPUTS, "down")(x), name="dropout")


def floats(*shape, outputs):
    def data(rng):
        return (
            rng.standard_normal((BATCH, *shape), "float32"),
            rng.standard_normal((BATCH, *outputs), "float32"),
        )

    return data


def every_token(rng):
    """Each token once, so those at the borders of the shards are there."""
    tokens = rng.permutation(VOCABULARY).reshape(BATCH, LENGTH)
    return (
        tokens.astype("int32"),
        rng.standard_normal((BATCH, LENGTH, OUTPUTS), "float32"),
    )


def attention_layouts(path, key_value=True):
    """Heads are split: dim 1 of the projections, dim 0 of the output's."""
    layouts = {f"{path}/attention_output/kernel": ("model", None, None)}
    names = ("query", "key", "value") if key_value else ("query",)
    for name in names:
        layouts[f"{path}/{name}/kernel"] = (None, "model", None)
        layouts[f"{path}/{name}/bias"] = ("model", None)
    return layouts


ATTENTION = attention_layouts("attention")
QUERY_ONLY = attention_layouts("attention", key_value=False)

CASES = {
    "mlp": Case(
        mlp,
        floats(FEATURES, outputs=(OUTPUTS,)),
        UP_AND_DOWN,
        ["up/kernel", "up/bias", "down/kernel"],
    ),
    "conv2d": Case(
        conv2d,
        floats(7, 6, 3, outputs=(16,)),
        {
            "conv_up/kernel": (None, None, None, "model"),
            "conv_up/bias": SPLIT,
            "conv_down/kernel": (None, None, "model", None),
            "head/kernel": COLUMN,
            "head/bias": SPLIT,
        },
        [
            "conv_up/kernel",
            "conv_up/bias",
            "conv_down/kernel",
            "head/kernel",
            "head/bias",
        ],
    ),
    "lstm": Case(
        recurrent(layers.LSTM),
        floats(LENGTH, FEATURES, outputs=(OUTPUTS,)),
        {
            "recurrent/lstm_cell/kernel": COLUMN,
            "recurrent/lstm_cell/recurrent_kernel": COLUMN,
            "recurrent/lstm_cell/bias": SPLIT,
            "down/kernel": ROW,
        },
        [
            "recurrent/lstm_cell/kernel",
            "recurrent/lstm_cell/recurrent_kernel",
            "recurrent/lstm_cell/bias",
            "down/kernel",
        ],
    ),
    "gru": Case(
        recurrent(layers.GRU),
        floats(LENGTH, FEATURES, outputs=(OUTPUTS,)),
        {
            "recurrent/gru_cell/kernel": COLUMN,
            "recurrent/gru_cell/recurrent_kernel": COLUMN,
            "recurrent/gru_cell/bias": COLUMN,
            "down/kernel": ROW,
        },
        [
            "recurrent/gru_cell/kernel",
            "recurrent/gru_cell/recurrent_kernel",
            "recurrent/gru_cell/bias",
            "down/kernel",
        ],
    ),
    "multi_head_attention": Case(
        multi_head_attention,
        floats(LENGTH, FEATURES, outputs=(LENGTH, OUTPUTS)),
        ATTENTION,
        [
            "attention/query/kernel",
            "attention/query/bias",
            "attention/key/kernel",
            "attention/key/bias",
            "attention/value/kernel",
            "attention/value/bias",
            "attention/attention_output/kernel",
        ],
        # It shifts all scores of a query alike, and the softmax drops that.
        zero_gradient=["attention/key/bias"],
    ),
    "grouped_query_attention": Case(
        grouped_query_attention(4),
        floats(LENGTH, FEATURES, outputs=(LENGTH, OUTPUTS)),
        ATTENTION,
        [
            "attention/query/kernel",
            "attention/query/bias",
            "attention/key/kernel",
            "attention/key/bias",
            "attention/value/kernel",
            "attention/value/bias",
            "attention/attention_output/kernel",
        ],
        zero_gradient=["attention/key/bias"],
    ),
    # More devices than heads of keys and values: these are replicated.
    "multi_query_attention": Case(
        grouped_query_attention(1),
        floats(LENGTH, FEATURES, outputs=(LENGTH, OUTPUTS)),
        QUERY_ONLY,
        [
            "attention/query/kernel",
            "attention/query/bias",
            "attention/attention_output/kernel",
        ],
        zero_gradient=["attention/key/bias"],
    ),
    "einsum_dense": Case(
        einsum_dense,
        floats(LENGTH, FEATURES, outputs=(LENGTH, 7)),
        {
            "up/kernel": (None, "model", None),
            "up/bias": ("model", None),
            "down/kernel": ("model", None, None),
        },
        ["up/kernel", "up/bias", "down/kernel"],
    ),
    "embedding_rows": Case(
        embedding,
        every_token,
        {"tokens/embeddings": ("model", None)},
        ["tokens/embeddings"],
        sgd_rate=0.5,
        reduces=False,
    ),
    "embedding_columns": Case(
        embedding,
        every_token,
        {"tokens/embeddings": (None, "model"), "down/kernel": ROW},
        ["tokens/embeddings", "down/kernel"],
        sgd_rate=0.5,
    ),
    "batch_normalization": Case(
        batch_normalization,
        floats(FEATURES, outputs=(OUTPUTS,)),
        {
            "up/kernel": COLUMN,
            # Not ".*": the output of the layer has a path too.
            "norm/(gamma|beta|moving_mean|moving_variance)": SPLIT,
            "down/kernel": ROW,
        },
        [
            "up/kernel",
            "norm/gamma",
            "norm/beta",
            "norm/moving_mean",
            "norm/moving_variance",
            "down/kernel",
        ],
    ),
    "layer_normalization": Case(
        layer_normalization,
        floats(FEATURES, outputs=(OUTPUTS,)),
        {**UP_AND_DOWN, "norm/(gamma|beta)": SPLIT},
        ["up/kernel", "up/bias", "norm/gamma", "norm/beta", "down/kernel"],
    ),
    "dropout": Case(
        dropout,
        floats(FEATURES, outputs=(OUTPUTS,)),
        UP_AND_DOWN,
        ["up/kernel", "up/bias", "down/kernel"],
    ),
}


def hub(backbone, scale=8.0, **kwargs):
    """Token logits of a KerasHub model, through its own embedding."""

    def build():
        # Imported late: it takes seconds, and most tests do without.
        import keras_hub

        model = getattr(keras_hub.models, backbone)(
            vocabulary_size=HUB_VOCABULARY,
            num_layers=HUB_LAYERS,
            hidden_dim=HUB_HIDDEN,
            **kwargs,
        )
        outputs = model.output
        if isinstance(outputs, dict):
            outputs = outputs["sequence_output"]
        logits = model.token_embedding(outputs, reverse=True)
        model = keras.Model(model.input, logits, name="tokens")
        rng = np.random.default_rng(7)
        for variable in model.trainable_variables:
            if variable.path.endswith(("/bias", "/beta")):
                # Zeros at first: one that is added twice is not noticed.
                value = rng.uniform(-0.3, 0.3, variable.shape)
                variable.assign(value.astype("float32"))
            elif len(variable.shape) > 1:
                # Made for large dims: attention is uniform at first, and the
                # gradients of queries and keys are next to nothing.
                value = keras.ops.convert_to_numpy(variable)
                variable.assign(value * np.float32(scale))
        return model

    return build


def hub_data(*more_inputs):
    def data(rng):
        shape = (BATCH, HUB_LENGTH)
        mask = np.ones(shape, "int32")
        mask[1, -3:] = 0
        inputs = {
            "token_ids": rng.integers(0, HUB_VOCABULARY, shape).astype("int32"),
            "padding_mask": mask,
        }
        for name in more_inputs:
            inputs[name] = rng.integers(0, 2, shape).astype("int32")
        targets = rng.integers(0, HUB_VOCABULARY, shape).astype("int32")
        return inputs, targets

    return data


def hub_case(build, block, split_in_block, split, layouts, **kwargs):
    """A case whose blocks, `block` with an index, are split alike."""
    kwargs.setdefault("data", hub_data())
    blocks = [block.format(i) for i in range(HUB_LAYERS)]
    zero = kwargs.pop("zero_gradient_in_block", ())
    return Case(
        build,
        layouts=layouts,
        split=[
            *split,
            *(f"{block}/{path}" for block in blocks for path in split_in_block),
        ],
        zero_gradient=[f"{block}/{path}" for block in blocks for path in zero],
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        sgd_rate=0.3,
        **kwargs,
    )


FEED_FORWARD = {
    ".*/feedforward_intermediate_dense/kernel": COLUMN,
    ".*/feedforward_intermediate_dense/bias": SPLIT,
    ".*/feedforward_output_dense/kernel": ROW,
}


def classic(backbone, embeddings, attention, **kwargs):
    """OPT, GPT-2, BERT and RoBERTa: biases, and logits tied to the tokens."""
    data = kwargs.pop("data", hub_data())
    return hub_case(
        hub(
            backbone,
            num_heads=4,
            intermediate_dim=HUB_INTERMEDIATE,
            max_sequence_length=HUB_LENGTH,
            dropout=0.0,
            **kwargs,
        ),
        "transformer_layer_{}",
        [
            f"{attention}/query/kernel",
            f"{attention}/query/bias",
            f"{attention}/key/kernel",
            f"{attention}/key/bias",
            f"{attention}/value/kernel",
            f"{attention}/value/bias",
            f"{attention}/attention_output/kernel",
            "feedforward_intermediate_dense/kernel",
            "feedforward_intermediate_dense/bias",
            "feedforward_output_dense/kernel",
        ],
        [embeddings],
        {
            embeddings: ("model", None),
            **attention_layouts(f".*/{attention}"),
            **FEED_FORWARD,
        },
        data=data,
        zero_gradient_in_block=[f"{attention}/key/bias"],
    )


def gated(backbone, key_value_heads, split_key_value, **kwargs):
    """Llama and Mistral: no biases, gated, grouped heads, untied logits."""
    attention = {
        pattern: axes
        for pattern, axes in attention_layouts(
            ".*/self_attention", split_key_value
        ).items()
        if not pattern.endswith("/bias")
    }
    key_value = ["self_attention/key/kernel", "self_attention/value/kernel"]
    return hub_case(
        hub(
            backbone,
            num_query_heads=8,
            num_key_value_heads=key_value_heads,
            intermediate_dim=HUB_INTERMEDIATE,
            dropout=0.0,
            **kwargs,
        ),
        "transformer_layer_{}",
        [
            "self_attention/query/kernel",
            *(key_value if split_key_value else []),
            "self_attention/attention_output/kernel",
            "feedforward_intermediate_dense/kernel",
            "feedforward_gate_dense/kernel",
            "feedforward_output_dense/kernel",
        ],
        ["token_embedding/embeddings", "token_embedding/reverse_embeddings"],
        {
            "token_embedding/embeddings": ("model", None),
            "token_embedding/reverse_embeddings": (None, "model"),
            **attention,
            ".*/feedforward_(intermediate|gate)_dense/kernel": COLUMN,
            ".*/feedforward_output_dense/kernel": ROW,
        },
    )


CASES["opt"] = classic(
    "OPTBackbone", "embeddings/token_embedding/embeddings", "self_attention"
)
CASES["gpt2"] = classic(
    "GPT2Backbone", "token_embedding/embeddings", "self_attention"
)
CASES["bert"] = classic(
    "BertBackbone",
    "token_embedding/embeddings",
    "self_attention_layer",
    data=hub_data("segment_ids"),
)
CASES["roberta"] = classic(
    "RobertaBackbone",
    "embeddings/token_embedding/embeddings",
    "self_attention_layer",
)
CASES["llama"] = gated("LlamaBackbone", 4, split_key_value=True)
CASES["mistral"] = gated(
    "MistralBackbone", 2, split_key_value=False, sliding_window=4
)
CASES["gemma"] = hub_case(
    hub(
        "GemmaBackbone",
        scale=1.0,
        num_query_heads=4,
        num_key_value_heads=4,
        head_dim=6,
        # The gate takes half of it.
        intermediate_dim=2 * HUB_INTERMEDIATE,
    ),
    "decoder_block_{}",
    [
        "attention/query/kernel",
        "attention/key/kernel",
        "attention/value/kernel",
        "attention/attention_output/kernel",
        "ffw_gating/kernel",
        "ffw_gating_2/kernel",
        "ffw_linear/kernel",
    ],
    ["token_embedding/embeddings"],
    {
        "token_embedding/embeddings": ("model", None),
        # Here the heads are dim 0 of every projection.
        ".*/attention/(query|key|value|attention_output)/kernel": (
            "model",
            None,
            None,
        ),
        ".*/ffw_gating(_2)?/kernel": COLUMN,
        ".*/ffw_linear/kernel": ROW,
    },
)
