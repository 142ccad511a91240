"""The text that `train_lm.py` trains on, and the text that it generates."""

import pathlib
import sysconfig

import keras_hub
import numpy as np
from keras import ops

# What the samples begin with.
PROMPTS = ("    def __init__(", "import ", "        return ")


def read_text():
    """Returns the text to train on and the held-out text.

    Returns:
        Two arrays of bytes. Every tenth file of the standard library is held
        out, in the order of their names.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    held_out = b"".join(files[9::10])
    train = b"".join(f for i, f in enumerate(files) if i % 10 != 9)
    return (np.frombuffer(text, "uint8") for text in (train, held_out))


def inputs_and_targets(text, starts, length):
    """Cuts sequences from a text.

    Args:
        text: Array of bytes.
        starts: Array of ints, where each sequence starts.
        length: Int, bytes in a sequence.

    Returns:
        The inputs of an OPT model, and for each byte the one that follows.
    """
    cut = text[starts[:, None] + np.arange(length + 1)].astype("int32")
    inputs = {
        "token_ids": cut[:, :-1],
        "padding_mask": np.ones_like(cut[:, :-1]),
    }
    return inputs, cut[:, 1:]


def unigram_entropy(targets):
    """Returns the entropy of single bytes in nats.

    No model that ignores the context has a lower loss on these bytes.
    """
    share = np.bincount(targets.ravel()) / targets.size
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


class GumbelSampler(keras_hub.samplers.Sampler):
    """Draws bytes with noise that NumPy makes.

    The largest sum of a log-probability and Gumbel noise is a draw from the
    distribution. As no random numbers of the backend are used, the draws are
    the same on any backend and mesh.

    Args:
        length: Int, the largest number of bytes in a sequence.
        rows: Int, the largest number of sequences.
        vocabulary: Int, number of different bytes.
        seed: Int.
        temperature: Float. Lower values prefer likely bytes.
    """

    def __init__(self, length, rows, vocabulary, seed, temperature):
        super().__init__(temperature=temperature)
        rng = np.random.default_rng(seed)
        noise = rng.gumbel(size=(length, rows, vocabulary))
        self.noise = noise.astype("float32")
        self.index = None

    def __call__(self, next, *args, **kwargs):
        def remember_index(prompt, cache, index):
            self.index = index
            return next(prompt, cache, index)

        return super().__call__(remember_index, *args, **kwargs)

    def get_next_token(self, probabilities):
        rows = ops.shape(probabilities)[0]
        noise = ops.take(self.noise[:, :rows], self.index, axis=0)
        return ops.argmax(ops.log(probabilities) + noise, axis=-1)


def sample(model, length):
    """Returns texts that the model generates, one for each of `PROMPTS`.

    Args:
        model: KerasHub model whose tokens are bytes.
        length: Int, bytes in each text, its prompt included.

    Returns:
        List of byte strings.
    """
    prompts = [prompt.encode()[:length] for prompt in PROMPTS]
    tokens = np.zeros((len(prompts), length), "int32")
    known = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = list(prompt)
        known[row, : len(prompt)] = 1
    prompt = {"token_ids": tokens, "padding_mask": known}
    generated = model.generate(prompt, stop_token_ids=None)["token_ids"]
    return [bytes(row) for row in np.asarray(generated).astype("uint8")]
