"""95 % intervals: of means over prompts, of rates, over seeds, of games in pairs, of neighbours in a text.

Each function takes values that are independent of each other, and returns the two ends.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Values = Sequence[float] | npt.NDArray[np.float64]

LEVEL = 0.95
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
"""Standard deviations of a normal distribution on either side of its mean that hold 95 % of it."""
_RESAMPLES = 10_000
_MOST_STRETCHES = 10


def mean_interval(values: Values, *, bounds: tuple[float, float] | None = None) -> tuple[float, float]:
    """Returns the interval of a mean, such as a reward's over prompts or of differences of the same prompts.

    A bootstrap, but where it would be too narrow: values that are 0 or 1, or all the same, have
    `bounded_interval` if their bounds are known. The interval of a single value is infinite.
    """
    numbers = np.asarray(values, np.float64)
    if bounds is not None and (np.isin(numbers, bounds).all() or (numbers == numbers[0]).all()):
        return bounded_interval(numbers, *bounds)
    return bootstrap_interval(numbers)


def bounded_interval(values: Values, low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
    """Returns the score interval of the mean of values between two bounds: a rate's, or of points a game.

    Wilson's (1927), where all values are at a bound. Values in between vary less than those by the mean of
    u (1 - u), scaled to bounds of 0 and 1. Taken as it is, that would leave no width where all are the same:
    it is spread over z² values more that are at a bound, as Wilson's interval shifts the mean.
    """
    scaled = (np.asarray(values, np.float64) - low) / (high - low)
    num, mean, z2 = len(scaled), float(scaled.mean()), _Z**2
    between = float((scaled * (1 - scaled)).sum()) / (num + z2)
    middle = mean + z2 / (2 * num)
    spread = mean * (1 - mean) + z2 / (4 * num) - between * (1 + z2 / num)
    reach = math.sqrt(max(0.0, z2 / num * spread))
    ends = ((middle + sign * reach) / (1 + z2 / num) for sign in (-1, 1))
    least, most = (min(1.0, max(0.0, end)) for end in ends)
    return low + (high - low) * least, low + (high - low) * most


def bootstrap_interval(values: Values) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of a mean (Efron, 1979), of 10,000 resamples.

    Resamples vary less than samples, by (n - 1) / n, and have no heavier tails than a normal distribution:
    percentiles are taken further out, as Student's t has them (Hesterberg, 2015, "expanded percentiles").
    """
    numbers, num = np.asarray(values, np.float64), len(values)
    if num < 2:
        return -math.inf, math.inf
    rng = np.random.default_rng(0)
    drawn = (rng.integers(num, size=(100, num)) for _ in range(_RESAMPLES // 100))  # not all in memory
    means = np.concatenate([numbers[indices].mean(1) for indices in drawn])
    tail = NormalDist().cdf(-math.sqrt(num / (num - 1)) * _t_quantile(num - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def t_interval(values: Values) -> tuple[float, float]:
    """Returns Student's interval of the mean of a few normal values, such as one a seed; infinite for one."""
    numbers, num = np.asarray(values, np.float64), len(values)
    if num < 2:
        return -math.inf, math.inf
    reach = _t_quantile(num - 1) * float(numbers.std(ddof=1)) / math.sqrt(num)
    return float(numbers.mean()) - reach, float(numbers.mean()) + reach


def neighbours_interval(values: Values) -> tuple[float, float]:
    """Returns the interval of the mean of values whose neighbours are alike, such as windows of a text.

    Its error is that of the means of at most ten stretches of neighbours (batch means).
    """
    stretches = np.array_split(np.asarray(values, np.float64), min(_MOST_STRETCHES, len(values)))
    return t_interval([float(stretch.mean()) for stretch in stretches])


def ratio_interval(ratios: Values) -> tuple[float, float]:
    """Returns the interval of the geometric mean of ratios, by Student's t of their logarithms."""
    low, high = t_interval(np.log(np.asarray(ratios, np.float64)))
    return math.exp(low), math.exp(high)


def _t_quantile(degrees: int) -> float:
    from scipy.special import stdtrit  # scipy.stats takes 23 MB, and a second

    return float(stdtrit(degrees, (1 + LEVEL) / 2))
