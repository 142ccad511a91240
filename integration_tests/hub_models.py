"""Tiny KerasHub models, with their heads, as plans are tested on them.

All dims that count divide by 4 but the heads of keys and values of those
models that have fewer of them than of queries.
"""

import functools

import keras
import numpy as np

VOCABULARY = 96
LAYERS = 2
HEADS = 4
HIDDEN = 64
FEED_FORWARD = 256
LENGTH = 16

TOKENS = {"vocabulary_size": VOCABULARY, "num_layers": LAYERS}
CLASSIC = {
    **TOKENS,
    "num_heads": HEADS,
    "hidden_dim": HIDDEN,
    "intermediate_dim": FEED_FORWARD,
}
GROUPED = {
    **TOKENS,
    "num_query_heads": HEADS,
    "num_key_value_heads": 2,
    "hidden_dim": HIDDEN,
    "intermediate_dim": FEED_FORWARD,
}
POSITIONS = {"max_sequence_length": LENGTH}


def models():
    # Imported late: it takes seconds, and most tests do without.
    import keras_hub

    return keras_hub.models


def task(name, task_name, **kwargs):
    """Builds a task model: the backbone and its head."""
    backbone = getattr(models(), f"{name}Backbone")(**kwargs)
    cls = getattr(models(), f"{name}{task_name}")
    if task_name == "ImageClassifier":
        return cls(backbone, num_classes=8, preprocessor=None)
    return cls(backbone, preprocessor=None)


def backbone(name, **kwargs):
    return getattr(models(), f"{name}Backbone")(**kwargs)


def clip():
    hub = models()
    from keras_hub.src.models.clip.clip_text_encoder import CLIPTextEncoder
    from keras_hub.src.models.clip.clip_vision_encoder import CLIPVisionEncoder

    vision = CLIPVisionEncoder(
        patch_size=4,
        hidden_dim=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_dim=FEED_FORWARD,
        image_shape=(32, 32, 3),
        name="vision_encoder",
    )
    text = CLIPTextEncoder(
        vocabulary_size=VOCABULARY,
        embedding_dim=HIDDEN,
        hidden_dim=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_dim=FEED_FORWARD,
        max_sequence_length=LENGTH,
        name="text_encoder",
    )
    return hub.CLIPBackbone(vision, text, projection_dim=32)


def causal_lm(name, **kwargs):
    return functools.partial(task, name, "CausalLM", **kwargs)


def masked_lm(name, **kwargs):
    kwargs = {**CLASSIC, **POSITIONS, **kwargs}
    return functools.partial(task, name, "MaskedLM", **kwargs)


MODELS = {
    "opt": causal_lm("OPT", **CLASSIC, **POSITIONS),
    "gpt2": causal_lm("GPT2", **CLASSIC, **POSITIONS),
    "bert": masked_lm("Bert"),
    "roberta": masked_lm("Roberta"),
    "albert": masked_lm("Albert", embedding_dim=32),
    "distil_bert": masked_lm("DistilBert"),
    "llama": causal_lm("Llama", **{**GROUPED, "num_key_value_heads": HEADS}),
    "llama_grouped": causal_lm("Llama", **{**GROUPED, "num_query_heads": 8}),
    "llama3": causal_lm("Llama3", **GROUPED),
    "gemma": causal_lm(
        "Gemma", **{**GROUPED, "num_key_value_heads": 1}, head_dim=16
    ),
    "gemma2": causal_lm(
        "Gemma",
        **GROUPED,
        head_dim=8,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        use_sliding_window_attention=True,
    ),
    "mistral": causal_lm("Mistral", **GROUPED, sliding_window=LENGTH),
    "mixtral": causal_lm(
        "Mixtral", **GROUPED, sliding_window=LENGTH, num_experts=4
    ),
    "qwen": causal_lm("Qwen", **GROUPED),
    "phi3": causal_lm("Phi3", **GROUPED),
    "falcon": causal_lm(
        "Falcon",
        **TOKENS,
        num_attention_heads=HEADS,
        hidden_dim=HIDDEN,
        intermediate_dim=FEED_FORWARD,
    ),
    "bloom": causal_lm("Bloom", **CLASSIC),
    "gpt_neo_x": causal_lm("GPTNeoX", **CLASSIC, **POSITIONS),
    "t5": functools.partial(backbone, "T5", **CLASSIC),
    "bart": functools.partial(
        task, "Bart", "Seq2SeqLM", **CLASSIC, **POSITIONS
    ),
    "vit": functools.partial(
        task,
        "ViT",
        "ImageClassifier",
        image_shape=(32, 32, 3),
        patch_size=4,
        num_layers=LAYERS,
        num_heads=HEADS,
        hidden_dim=HIDDEN,
        mlp_dim=FEED_FORWARD,
    ),
    "clip": clip,
    "whisper": functools.partial(
        backbone,
        "Whisper",
        **CLASSIC,
        num_mels=20,
        max_encoder_sequence_length=32,
        max_decoder_sequence_length=LENGTH,
    ),
    "resnet": functools.partial(
        task,
        "ResNet",
        "ImageClassifier",
        input_conv_filters=[16],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 128],
        stackwise_num_blocks=[2, 2],
        stackwise_num_strides=[1, 2],
        block_type="bottleneck_block",
        image_shape=(32, 32, 3),
    ),
    "efficient_net": functools.partial(
        task,
        "EfficientNet",
        "ImageClassifier",
        stackwise_width_coefficients=[1.0, 1.0],
        stackwise_depth_coefficients=[1.0, 1.0],
        stackwise_kernel_sizes=[3, 5],
        stackwise_num_repeats=[1, 2],
        stackwise_input_filters=[16, 16],
        stackwise_output_filters=[16, 24],
        stackwise_expansion_ratios=[4, 4],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["v1", "v1"],
        input_shape=(32, 32, 3),
        num_features=64,
    ),
}


def build(name):
    """Builds one of the models, from a fixed seed."""
    keras.utils.set_random_seed(1)
    return MODELS[name]()


def data(model, batch=2):
    """Returns inputs and targets for a model: any that are possible."""
    rng = np.random.default_rng(5)

    def values(tensor):
        shape = (batch, *(size or LENGTH for size in tensor.shape[1:]))
        if "mask" in tensor.name:
            return np.ones(shape, "int32")
        if "int" in tensor.dtype:
            # Token 0 may be padding.
            ends = (0, 2) if "segment" in tensor.name else (1, VOCABULARY)
            return rng.integers(*ends, shape).astype("int32")
        return rng.standard_normal(shape, "float32")

    x = keras.tree.map_structure(values, model.input)
    outputs = keras.tree.map_structure(np.asarray, model.predict_on_batch(x))
    y = keras.tree.map_structure(
        lambda a: rng.standard_normal(a.shape, "float32"), outputs
    )
    return x, y
