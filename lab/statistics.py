"""Means and differences with their 95 % intervals, over seeds and over images."""

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
FEWEST = 3  # values that get an interval: that of two would be 13 times as wide as their distance


class Interval(NamedTuple):
    """A figure and the bounds of its 95 % interval, None where there are too few values for one."""

    value: float
    low: float | None = None
    high: float | None = None


def mean(values: Sequence[float]) -> Interval:
    """Computes the mean of values, one for each seed, with Student's interval."""
    return combination([values], [1])


def combination(groups: Sequence[Sequence[float]], weights: Sequence[float]) -> Interval:
    """Computes the weighted sum of the groups' means, with the interval of Welch and Satterthwaite: all values count as
    independent, and each group has its own variance."""
    value = float(np.dot(weights, [np.mean(values) for values in groups]))
    if min(map(len, groups)) < FEWEST:
        return Interval(value)
    shares = np.array([(weight * stats.sem(values)) ** 2 for values, weight in zip(groups, weights)])
    if not shares.any():
        return Interval(value)
    freedom = shares.sum() ** 2 / np.sum(shares**2 / [len(values) - 1 for values in groups])
    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom) * np.sqrt(shares.sum()))
    return Interval(value, value - half, value + half)


def difference(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Computes the mean of `one` minus that of `other`, with Welch's interval."""
    return combination((one, other), (1, -1))


def read_bits(hits: dict[str, Any]) -> np.ndarray:
    """Unpacks from a record of `lab.hits` which images were right: (count,) of 0 and 1."""
    return np.unpackbits(np.frombuffer(base64.b64decode(hits["bits"]), np.uint8), count=hits["count"])


def over_images(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Interval:
    """Computes the difference in per cent of two variants on the same images, with a percentile bootstrap over these.
    Each variant has an array (count,) of 0 and 1 for each seed; seeds are averaged."""
    shares = 100 * (np.mean(one, axis=0) - np.mean(other, axis=0))
    batch, rng = max(1, 2_000_000 // len(shares)), np.random.default_rng(0)  # the same figures each time
    found = stats.bootstrap((shares,), np.mean, confidence_level=LEVEL, batch=batch, method="percentile",
                            random_state=rng).confidence_interval  # fmt: skip
    return Interval(float(np.mean(shares)), float(found.low), float(found.high))
