"""A small Llama from its config: planned before it is built, trained, sampled.

Heads of keys and values are fewer than those of queries; the plan says what is
split where, and what that costs.

    python -m keras_tp.launch --devices 2 examples/llama.py
"""

import keras
import keras_hub
import numpy as np

from keras_tp import distribution

VOCABULARY, LENGTH = 64, 16


def build():
    """Returns a Llama of two blocks."""
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
    )
    return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)


def main():
    """Plans, builds, trains and samples."""
    keras.utils.set_random_seed(0)
    devices = distribution.list_devices()
    mesh = distribution.DeviceMesh((len(devices),), ["model"], devices)
    plan = distribution.plan_sharding(build, mesh)
    print(plan.summary())
    with plan.distribution().scope():
        model = build()
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[],
            sampler="greedy",
        )
    # Counting: each token is the one before plus one.
    start = np.random.default_rng(0).integers(0, VOCABULARY, (64, 1))
    tokens = ((start + np.arange(LENGTH + 1)) % VOCABULARY).astype("int32")
    mask = np.ones((64, LENGTH), "int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": mask}
    history = model.fit(x, tokens[:, 1:], batch_size=16, epochs=20, verbose=0)
    print("losses", history.history["loss"][::5])
    print("sends", distribution.count_collectives(model, x, tokens[:, 1:]))
    prompt = {
        "token_ids": tokens[:1, :-1],
        "padding_mask": (np.arange(LENGTH) < 4)[None].astype("int32"),
    }
    sample = model.generate(prompt, stop_token_ids=None)["token_ids"]
    print("prompt", tokens[0, :4], "sample", np.asarray(sample)[0])


if __name__ == "__main__":
    main()
