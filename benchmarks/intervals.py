"""How sure a ratio of times is."""

import numpy as np


def ratio_interval(numerators, denominators, resamples=10000):
    """Returns a 95 % bootstrap interval of the ratio of two medians.

    Rounds are drawn again with replacement, both turns of a round together:
    they met the same machine.
    """
    numerators, denominators = np.array(numerators), np.array(denominators)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(numerators), size=(resamples, len(numerators)))
    ratios = np.median(numerators[drawn], axis=1) / np.median(
        denominators[drawn], axis=1
    )
    return [float(bound) for bound in np.percentile(ratios, [2.5, 97.5])]
