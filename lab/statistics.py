"""Means and differences with their 95 % intervals, over seeds and over images."""

import base64
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 9999
FEWEST = 3  # values of each kind that have an interval: that of two would be 13 times as wide as they lie apart


class Interval(NamedTuple):
    """A figure and the bounds of its 95 % interval, None where there are too few values for one."""

    value: float
    low: float | None
    high: float | None


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of values, one for each seed, with Student's interval."""
    mean = float(np.mean(values))
    if len(values) < FEWEST:
        return Interval(mean, None, None)
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values)
    return Interval(mean, mean - float(half), mean + float(half))


def difference(one: Sequence[float], other: Sequence[float]) -> Interval:
    """The mean of `one` less that of `other`, with Welch's interval: their variances may differ."""
    value = float(np.mean(one) - np.mean(other))
    if min(len(one), len(other)) < FEWEST or np.ptp(one) == np.ptp(other) == 0:
        return Interval(value, None, None)
    with warnings.catch_warnings():  # of seeds that agree to the last digit scipy says that precision is lost
        warnings.simplefilter("ignore", RuntimeWarning)
        bounds = stats.ttest_ind(one, other, equal_var=False).confidence_interval(LEVEL)
    return Interval(value, float(bounds.low), float(bounds.high))


def paired(one: Sequence[float], other: Sequence[float]) -> Interval:
    """The mean of what `one` is more than `other`, value by value, with Student's interval: for runs that share their
    seeds, and with these the order of the images."""
    return mean_interval([first - second for first, second in zip(one, other, strict=True)])


def combination(groups: Sequence[Sequence[float]], weights: Sequence[float]) -> Interval:
    """The sum of the groups' means, each times its weight, with the interval of Welch and Satterthwaite: all runs count
    as independent, and each group, which stands here once, has a variance of its own. With two groups and the weights
    1 and -1 it is `difference`."""
    value = float(np.dot(weights, [np.mean(values) for values in groups]))
    if min(map(len, groups)) < FEWEST:
        return Interval(value, None, None)
    shares = np.array([(weight * stats.sem(values)) ** 2 for values, weight in zip(groups, weights)])
    weighed = float(np.sum(shares**2 / [len(values) - 1 for values in groups]))
    if not weighed:
        return Interval(value, None, None)
    half = stats.t.ppf((1 + LEVEL) / 2, shares.sum() ** 2 / weighed) * np.sqrt(shares.sum())
    return Interval(value, value - float(half), value + float(half))


def read_bits(hits: dict[str, Any]) -> np.ndarray:
    """Which images were right, (count,) of 0 and 1, as `hits_of` has packed them."""
    return np.unpackbits(np.frombuffer(base64.b64decode(hits["bits"]), np.uint8), count=hits["count"])


def over_images(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Interval:
    """The difference in per cent of two variants on the same images, with a percentile bootstrap over these.

    Args:
        one, other: For each seed, which images were right: (count,) of 0 and 1. Seeds are averaged.
    """
    shares = 100 * (np.mean(one, axis=0) - np.mean(other, axis=0))  # (count,)
    found = stats.bootstrap(
        (shares,),
        np.mean,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        batch=max(1, 2_000_000 // len(shares)),
        method="percentile",
        random_state=np.random.default_rng(0),  # the same figures each time
    )
    bounds = found.confidence_interval
    return Interval(float(np.mean(shares)), float(bounds.low), float(bounds.high))
