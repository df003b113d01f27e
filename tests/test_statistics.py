"""Intervals are other libraries', or worked out by hand; and they hold the truth as often as they say."""

import math

import numpy as np
import pytest
from scipy import stats

from grpo.statistics import (
    bootstrap_interval,
    bounded_interval,
    mean_interval,
    neighbours_interval,
    ratio_interval,
    t_interval,
)


@pytest.mark.parametrize(("hits", "num"), [(0, 1), (7, 7), (0, 200), (8, 10), (199, 200), (40, 1000)])
def test_the_interval_of_a_rate_is_scipys(hits, num):
    theirs = stats.binomtest(hits, num).proportion_ci(0.95, "wilson")
    for interval in bounded_interval, lambda values: mean_interval(values, bounds=(0.0, 1.0)):
        assert interval([1] * hits + [0] * (num - hits)) == pytest.approx(
            (theirs.low, theirs.high), abs=1e-12
        )


def test_values_that_are_all_the_same_leave_some_doubt_where_their_bounds_are_known():
    for values, bounds in (([0.5] * 200, (0.0, 1.0)), ([0.0] * 200, (-1.0, 1.0))):
        low, high = mean_interval(values, bounds=bounds)
        assert low < values[0] < high
        assert 0.005 < (high - low) / (bounds[1] - bounds[0]) < 0.05
    assert mean_interval([0.5] * 200) == (0.5, 0.5)
    assert mean_interval([0.5]) == t_interval([0.5]) == (-math.inf, math.inf)


def test_a_bootstrap_of_many_values_is_scipys():
    values = np.random.default_rng(0).exponential(size=2000)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", rng=1).confidence_interval
    assert bootstrap_interval(values) == pytest.approx((theirs.low, theirs.high), abs=2e-3)
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_few_values_have_students_interval():
    values = [0.3, -0.1, 0.4, 0.2, 0.0]
    theirs = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert t_interval(values) == pytest.approx((theirs.low, theirs.high))
    logs = stats.ttest_1samp(np.log([1.2, 1.5, 1.4]), 0.0).confidence_interval(0.95)
    assert ratio_interval([1.2, 1.5, 1.4]) == pytest.approx((math.exp(logs.low), math.exp(logs.high)))
    assert ratio_interval([2.0]) == (0.0, math.inf)


def test_neighbours_are_not_taken_for_independent():
    """Ten stretches whose means are 1 and 3 in turn."""
    values = [1.0, 3.0] * 5
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    for alike in (values, [value for value in values for _ in range(10)]):
        assert neighbours_interval(alike) == pytest.approx((expected.low, expected.high))


def covered(interval, draw, truth: float, *, times: int) -> float:
    """How often an interval holds the truth, over samples that are drawn anew."""
    rng = np.random.default_rng(0)
    ends = (interval(draw(rng)) for _ in range(times))
    return float(np.mean([low <= truth <= high for low, high in ends]))


def rates(chance: float, num: int):
    return lambda rng: (rng.random(num) < chance).astype(float)


def means_of_four_samples(rng) -> np.ndarray:
    """Scores of 50 prompts whose chances of being answered differ."""
    return rng.binomial(4, rng.beta(0.5, 1.5, 50)) / 4


def changed_answers(rng) -> np.ndarray:
    """Changes of 200 prompts: 8 % become right and 4 % wrong."""
    return rng.choice([-1.0, 0.0, 1.0], 200, p=[0.04, 0.88, 0.08])


def two_tasks(rng) -> np.ndarray:
    """Gains of a batch size on 200 held-out prompts, sorted by task: one task gains, the other loses."""
    num = rng.binomial(200, 0.5)
    return np.concatenate([rng.normal(0.04, 0.2, num), rng.normal(-0.02, 0.05, 200 - num)])


def pairs_of_games(rng) -> np.ndarray:
    """Points of 40 pairs: in both games of one the same start favours whoever has White."""
    favours = rng.random((40, 1)) * 0.4 + [0.0, 0.0]
    chances = np.stack([0.3 + favours[:, 0], 0.7 - favours[:, 1]], 1)
    return (rng.random((40, 2)) < chances).mean(1)


def windows(rng) -> np.ndarray:
    """200 windows of a text, each like the one before."""
    noise, values = rng.normal(size=200), np.zeros(200)
    for place in range(1, 200):
        values[place] = 0.6 * values[place - 1] + noise[place]
    return values


@pytest.mark.parametrize(
    ("interval", "draw", "truth", "times"),
    [
        pytest.param(bounded_interval, rates(0.3, 50), 0.3, 4000, id="rates"),
        pytest.param(bounded_interval, rates(0.05, 200), 0.05, 4000, id="small rates"),
        pytest.param(mean_interval, means_of_four_samples, 0.25, 600, id="means over prompts"),
        pytest.param(
            lambda values: mean_interval(values, bounds=(-1.0, 1.0)),
            changed_answers,
            0.04,
            600,
            id="differences of the same prompts",
        ),
        pytest.param(mean_interval, lambda rng: rng.exponential(size=30), 1.0, 800, id="few skewed rewards"),
        pytest.param(t_interval, lambda rng: rng.normal(0.1, 0.2, 2), 0.1, 4000, id="two seeds"),
        pytest.param(t_interval, lambda rng: rng.normal(0.1, 0.2, 5), 0.1, 4000, id="five seeds"),
        pytest.param(bounded_interval, pairs_of_games, 0.5, 4000, id="games in pairs"),
        pytest.param(mean_interval, two_tasks, 0.01, 600, id="a sweep with two tasks"),
        pytest.param(neighbours_interval, windows, 0.0, 2000, id="windows of a text"),
    ],
)
def test_an_interval_holds_the_truth_in_95_of_100_samples(interval, draw, truth, times):
    assert 0.93 <= covered(interval, draw, truth, times=times) <= 0.97
