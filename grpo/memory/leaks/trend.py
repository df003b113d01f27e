"""Does a series of memory readings still rise? One joint test, for one series or a thousand at once.

A leak is growth that goes on. Start-up, a cache that fills, a high-water mark and one evaluation all
grow too, and a plain Mann-Kendall test calls each of them significant. So, of the readings after the
first tenth of the run, all of this is asked:

1. Mann-Kendall's statistic (Mann 1945, Kendall 1975), corrected for autocorrelation, is above Z_WHOLE
   for all of them, above Z_HALF for the second half of the run and above Z_TAIL for its last 40 %.
2. The second half's Theil-Sen slope (Sen 1968), times the steps, is at least the growth asked for.
3. Both still hold with the one jump taken out that fits best, if it explains more than a line does.

The correction is Hamed and Rao's (1998) with the autocorrelation of an AR(1), as estimating each lag
on its own is too noisy for 200 steps. Its coefficient is that of the ranks of the residuals, free of
the bias that fitting a line brings (Tjøstheim and Paulsen 1983: -(2 + 4 phi) / n), and the mean of
two: around a line through everything, where a curve or a jump counts as autocorrelation and so against
a leak, and around one through the second half, where an early jump does not hide a leak that follows.

Residuals that are SMOOTH beside the growth need no correction: a line with a gentle bend is no noise.

The three thresholds were tuned on other seeds than tests/proof/leak_rates.py draws. Left out on
purpose: the correction for ties, which would make a staircase of few steps (a high-water mark)
significant; series that wander without bound (a random walk is a trend to this test); scipy, which would
add 23 MB to the process that is watched.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WARMUP = 0.1
"""Share of the run that is dropped at its start."""
HALF, TAIL = 0.5, 0.4
"""Shares of the run, at its end, that must rise on their own."""
Z_WHOLE, Z_HALF, Z_TAIL = 3.0, 2.0, 1.2
"""One-sided normal quantiles: p of 0.0013, 0.023 and 0.12."""
MAX_AUTOCORRELATION = 0.95
"""Above this a trend and noise cannot be told apart in a few hundred points."""
COVARIATE_Z = 3.0
"""Standard errors given to a covariate on top of what it explains."""
SMOOTH = 0.02
"""Residuals below this share of the growth are not noise: a line so straight needs no correction."""
MIN_STEPS = 40
MAX_POINTS = 256
"""Longer series are averaged over blocks of steps: pairs of points cost their square."""
_ROWS = 64  # series tested at once: their pairs take some 16 MB


@dataclass(frozen=True)
class Trends:
    """Of K series, arrays of (K,). Slopes are of the second half, in units a step."""

    rising: NDArray[np.bool_]
    p_value: Array  # one-sided, of the whole series
    slope: Array
    low: Array  # 95 % interval of the slope
    high: Array


def find_trends(series: Array, steps: Array, *, min_growth: float = 0.0) -> Trends:
    """Test each row of `series` (K, T) at `steps` (T,), rising numbers that may leave gaps.

    min_growth: least growth from the end of the warm-up to the end of the run, in the series' units.
    Raises ValueError for fewer than MIN_STEPS steps.
    """
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{len(steps)} steps are too few to tell a trend: run at least {MIN_STEPS}")
    values, times = _thin(settled(series), settled(steps))
    first = _test(values, times, min_growth)
    rising = first.rising.copy()
    if rising.any():
        rising[rising] = _test(without_jump(values[rising], times), times, min_growth).rising
    return Trends(rising, first.p_value, first.slope, first.low, first.high)


def settled(series: Array) -> Array:
    """What remains of (..., T) without the warm-up."""
    return series[..., int(series.shape[-1] * WARMUP) :]


def without_covariate(series: Array, covariate: Array) -> Array:
    """`series` (..., T) less what `covariate` (..., T) explains, at most.

    The coefficient is the one beside a line in time, so that a leak keeps what is its own, at the upper
    end of its interval (COVARIATE_Z standard errors, for residuals of an AR(1)); and never more than
    without that line. A covariate that hardly varies around its own trend explains all of the growth.
    """
    x, y = _centred(settled(covariate)), _centred(settled(series))
    count = x.shape[-1]
    time = np.arange(count) - (count - 1) / 2
    alone = _coefficient(x, y)
    x, y = (values - _coefficient(time, values) * time for values in (x, y))
    beside = _coefficient(x, y)
    rest = y - beside * x
    phi = np.clip(_coefficient(rest[..., :-1], rest[..., 1:]), 0.0, MAX_AUTOCORRELATION)
    spread = (x**2).sum(-1, keepdims=True)
    variance = (rest**2).sum(-1, keepdims=True) / (count - 3) * (1 + phi) / (1 - phi)
    error = np.sqrt(variance / np.where(spread > 0, spread, np.inf))
    slope = np.minimum(np.where(spread > 0, beside + COVARIATE_Z * error, np.inf), alone)
    return series - np.maximum(slope, 0.0) * (covariate - settled(covariate).mean(-1, keepdims=True))


def _centred(values: Array) -> Array:
    return values - values.mean(-1, keepdims=True)


def _coefficient(x: Array, y: Array) -> Array:
    """Of y (..., T) on x (..., T), both centred, by least squares, (..., 1); 0 where x is constant."""
    spread = (x**2).sum(-1, keepdims=True)
    return (x * y).sum(-1, keepdims=True) / np.where(spread > 0, spread, 1.0)


def without_jump(values: Array, times: Array) -> Array:
    """(K, n) without the one jump that fits best beside a line, where a jump alone beats a line alone."""
    count = len(times)
    centred = values - values.mean(1, keepdims=True)
    line = times - times.mean()
    by_line = (centred @ line) ** 2 / (line @ line)  # sums of squares explained
    jumps = np.tri(count, k=-1).T[1 : count - 1]  # jump j: 0 up to point j, 1 after it
    jumps = jumps - jumps.mean(1, keepdims=True)
    by_jump = ((centred @ jumps.T) ** 2 / (jumps**2).sum(1)).max(1)
    beside = jumps - np.outer(jumps @ line / (line @ line), line)  # what the line cannot explain of it
    norms = (beside**2).sum(1)
    heights = centred @ beside.T / norms  # (K, jumps), by least squares beside a line
    best = (heights**2 * norms).argmax(1)
    height = np.where(by_jump > by_line, heights[np.arange(len(values)), best], 0.0)
    return values - height[:, None] * jumps[best]


def _test(values: Array, times: Array, min_growth: float) -> Trends:
    """Points 1 and 2 of the rule for (K, n), in pieces that fit the cache."""
    pieces = [
        _test_piece(values[start : start + _ROWS], times, min_growth)
        for start in range(0, len(values), _ROWS)
    ]
    return Trends(
        *(
            np.concatenate([getattr(piece, name) for piece in pieces])
            for name in ("rising", "p_value", "slope", "low", "high")
        )
    )


def _test_piece(values: Array, times: Array, min_growth: float) -> Trends:
    count = len(times)
    half, tail = (round(count * share / (1 - WARMUP)) for share in (HALF, TAIL))
    slopes = pair_slopes(values, times)
    late = np.sort(slopes[:, -pairs(half) :], axis=1)  # pairs of later points come last
    middle, late_middle = np.median(slopes, axis=1), _median(late)
    phi = (
        autocorrelation(values - middle[:, None] * times, middle * (times[-1] - times[0]))
        + autocorrelation(
            values[:, -half:] - late_middle[:, None] * times[-half:],
            late_middle * (times[-1] - times[-half]),
        )
    ) / 2
    phi = np.clip(phi, 0.0, MAX_AUTOCORRELATION)
    z_whole, z_half, z_tail = (
        mann_kendall(slopes[:, -pairs(part) :], kendall_variance(part, phi)) for part in (count, half, tail)
    )
    slope, low, high = theil_sen(late, kendall_variance(half, phi))
    rising = (z_whole > Z_WHOLE) & (z_half > Z_HALF) & (z_tail > Z_TAIL)
    rising &= slope * (times[-1] - times[0]) >= min_growth
    p_value = np.array([math.erfc(z / math.sqrt(2)) / 2 for z in z_whole])  # of a standard normal's tail
    return Trends(rising, p_value, slope, low, high)


def pairs(count: int) -> int:
    return count * (count - 1) // 2


def pair_slopes(values: Array, times: Array) -> Array:
    """Slopes between all pairs of points, (K, pairs), ordered by the earlier point."""
    earlier, later = np.triu_indices(len(times), 1)
    return (values[:, later] - values[:, earlier]) / (times[later] - times[earlier])


def autocorrelation(residuals: Array, growth: Array) -> Array:
    """Of the ranks at lag 1, (K,), corrected for the line that was fitted, which rose by `growth` (K,)."""
    count = residuals.shape[1]
    unit = np.maximum(SMOOTH * np.abs(growth), 1.0)[:, None]  # bytes: what is less than one is rounding
    ranks = mean_ranks(np.rint((residuals - np.median(residuals, axis=1, keepdims=True)) / unit))
    ranks -= ranks.mean(1, keepdims=True)
    spread = (ranks**2).sum(1)
    phi = (ranks[:, 1:] * ranks[:, :-1]).sum(1) / np.where(spread > 0, spread, 1.0)
    return phi + np.where(spread > 0, (2 + 4 * phi) / count, 0.0)


def mean_ranks(values: Array) -> Array:
    """From 1 in each row of (K, n), equal values sharing the mean of theirs."""
    ends = [
        [np.searchsorted(ordered, row, side) for side in ("left", "right")]
        for ordered, row in zip(np.sort(values, axis=1), values, strict=True)
    ]
    return (np.array(ends).sum(1) + 1) / 2


def kendall_variance(count: int, phi: Array) -> Array:
    """Variance of Kendall's S for `count` points of an AR(1) noise, (K,): Hamed and Rao 1998, eq. 14."""
    lags = np.arange(1, count - 2)
    weights = (count - lags) * (count - lags - 1) * (count - lags - 2)
    correction = 1 + 2 / (count * (count - 1) * (count - 2)) * (phi[:, None] ** lags) @ weights
    return count * (count - 1) * (2 * count + 5) / 18 * correction


def mann_kendall(slopes: Array, variance: Array) -> Array:
    """Standard normal statistic of Kendall's S, with the correction for continuity, (K,)."""
    rises = np.sign(slopes).sum(1)
    return (rises - np.sign(rises)) / np.sqrt(variance)


def theil_sen(ordered: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Median of sorted slopes and its 95 % interval from the variance of S (Sen 1968), each (K,)."""
    count = ordered.shape[1]
    reach = NormalDist().inv_cdf(0.975) * np.sqrt(variance)
    low = np.maximum(np.rint((count - reach) / 2).astype(int) - 1, 0)
    high = np.minimum(np.rint((count + reach) / 2).astype(int), count - 1)
    rows = np.arange(len(ordered))
    return _median(ordered), ordered[rows, low], ordered[rows, high]


def _median(ordered: Array) -> Array:
    count = ordered.shape[1]
    return (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2


def _thin(values: Array, times: Array) -> tuple[Array, Array]:
    """Means over blocks of steps, so that at most MAX_POINTS remain; what is over falls off the start."""
    block = -(-len(times) // MAX_POINTS)
    kept = len(times) // block * block

    def means(array: Array) -> Array:
        return array[..., -kept:].reshape(*array.shape[:-1], -1, block).mean(-1)

    return means(values), means(times)
