import numpy as np
import pytest
from benchmarks.leak_series import HARDER, SHAPES, autoregressive, share_found, upper_bound
from scipy.stats import kendalltau, norm, rankdata, theilslopes

from grpo.memory.leaks.trend import (
    MAX_POINTS,
    autocorrelation,
    find_trends,
    kendall_variance,
    mann_kendall,
    mean_ranks,
    pair_slopes,
    theil_sen,
    without_covariate,
    without_jump,
)

MB = 2**20
STEPS = np.arange(200.0)
UNCORRELATED = np.zeros(1)


def sorted_slopes(series, steps):
    return np.sort(pair_slopes(series, steps), axis=1)


def noise(num=1, *, sd_mb=5.0, seed=0, steps=200):
    return np.random.default_rng(seed).normal(0, sd_mb * MB, (num, steps))


def found(values, steps=None, **options):
    values = np.atleast_2d(values)
    steps = np.arange(values.shape[1], dtype=float) if steps is None else steps
    return find_trends(values, steps, **options)


def test_kendalls_statistic_by_hand_and_by_scipy():
    # 1 2 3 4: all six pairs rise, the variance is 4 * 3 * 13 / 18, and 1 goes for continuity.
    slopes = pair_slopes(np.array([[1.0, 2, 3, 4]]), np.arange(4.0))
    assert mann_kendall(slopes, kendall_variance(4, UNCORRELATED))[0] == pytest.approx(5 / np.sqrt(26 / 3))

    series = noise(5)[:, :40]
    slopes = pair_slopes(series, np.arange(40.0))
    for row, values in enumerate(series):
        assert np.sign(slopes[row]).sum() == pytest.approx(kendalltau(np.arange(40), values)[0] * 780)


def test_the_slope_and_its_interval_are_scipys():
    steps = np.cumsum(np.random.default_rng(1).integers(1, 4, 50)).astype(float)  # steps may be missing
    series = noise(4, steps=50) + 0.1 * MB * steps
    slope, low, high = theil_sen(sorted_slopes(series, steps), kendall_variance(50, UNCORRELATED))
    for row, values in enumerate(series):
        expected = theilslopes(values, steps)
        assert [slope[row], low[row], high[row]] == pytest.approx([expected[0], *expected[2:]])


def test_equal_values_share_their_mean_rank():
    assert mean_ranks(np.array([[3.0, 1, 3, 3, 2]])).tolist() == [[4, 1, 4, 4, 2]]
    values = np.random.default_rng(0).integers(0, 20, (5, 40)).astype(float)
    np.testing.assert_array_equal(mean_ranks(values), rankdata(values, axis=1))


def test_the_p_value_is_of_the_upper_tail():
    # 36 of 40 points of a line are past the warm-up: all 630 pairs rise, and there is no noise.
    z = (630 - 1) / np.sqrt(36 * 35 * 77 / 18)
    assert found(0.5 * MB * np.arange(40.0)).p_value[0] == pytest.approx(norm.sf(z), rel=1e-6)


def test_time_run_backwards_flips_the_slope():
    series = noise(3) + 0.1 * MB * STEPS
    variance = kendall_variance(200, np.full(3, 0.5))
    slope, low, high = theil_sen(sorted_slopes(series, STEPS), variance)
    back, back_low, back_high = theil_sen(sorted_slopes(series[:, ::-1], STEPS), variance)
    assert back == pytest.approx(-slope)
    assert [back_low, back_high] == [pytest.approx(-high, rel=0.02), pytest.approx(-low, rel=0.02)]


def test_autocorrelation_makes_the_variance_larger():
    # Four points, lag 1 alone: 1 + 2 / (4 * 3 * 2) * (3 * 2 * 1) * 0.6
    assert kendall_variance(4, np.array([0.6]))[0] == pytest.approx(26 / 3 * 1.3)
    draws = autoregressive(noise(2000, steps=60), np.zeros(60), np.random.default_rng())
    rises = np.sign(pair_slopes(draws, np.arange(60.0))).sum(1)
    assert rises.var() == pytest.approx(kendall_variance(60, np.array([0.8]))[0], rel=0.1)


@pytest.mark.parametrize(("phi", "off"), [(0.0, 0.03), (0.8, 0.06)])
def test_autocorrelation_is_estimated_with_little_of_the_bias_of_the_line(phi, off):
    """Corrected to first order, which leaves about half of the bias at 0.8."""
    series = autoregressive(noise(400, steps=90), np.zeros(90), np.random.default_rng(), phi=phi)
    steps = np.arange(90.0)
    slopes = theil_sen(sorted_slopes(series, steps), kendall_variance(90, np.zeros(400)))[0]
    assert autocorrelation(series - slopes[:, None] * steps, np.zeros(400)).mean() == pytest.approx(
        phi, abs=off
    )


def test_a_constant_changes_nothing_and_a_factor_only_the_slope():
    series = noise(4, sd_mb=20) + np.array([[0.0], [0.1], [0.25], [1.0]]) * MB * STEPS
    plain, moved, scaled = found(series), found(series + 2**33), found(series * 8)
    for name in ("rising", "p_value", "slope", "low", "high"):
        np.testing.assert_allclose(getattr(moved, name), getattr(plain, name), rtol=1e-6)
    assert (scaled.rising == plain.rising).all() and scaled.slope == pytest.approx(8 * plain.slope)


@pytest.mark.parametrize("name", SHAPES)
def test_sound_series_are_no_leak_and_leaks_are_found(name):
    assert share_found(SHAPES[name], 5, 0.0, 150, seed=3) <= 0.02
    assert share_found(SHAPES[name], 80, 0.0, 150, seed=3) <= 0.02
    if name != "growing completions":  # what runs in parallel with the tokens is theirs
        assert share_found(SHAPES[name], 5, 0.3, 150, seed=3) >= 0.95


def test_one_late_jump_is_no_leak():
    assert share_found(HARDER["late jump"], 5, 0.0, 150, seed=3) <= 0.02


EXACT = 0.2 * MB * STEPS
JUMP = 300 * MB * (STEPS >= 150)
FILLING = 50 * MB * (1 - np.exp(-STEPS / 15))


@pytest.mark.parametrize(
    ("series", "leak"),
    [
        (EXACT, True),
        (EXACT // (4 * MB) * 4 * MB, True),  # a step up every 20 steps
        (EXACT + 300 * MB * (STEPS >= 60), True),
        (EXACT + JUMP, True),
        (EXACT + FILLING, True),
        (-EXACT, False),
        (0 * STEPS, False),
        (JUMP, False),
        (np.minimum(EXACT, EXACT[120]), False),
    ],
)
def test_series_without_noise(series, leak):
    assert found(2**32 + series, min_growth=4 * MB).rising[0] == leak


def test_the_slope_is_told_with_an_interval_that_holds_it():
    trends = found(noise(300, seed=4) + 0.25 * MB * STEPS)
    covered = (trends.low <= 0.25 * MB) & (trends.high >= 0.25 * MB)
    assert 0.91 <= covered.mean() <= 0.985
    # An early jump does not touch the slope: it is the second half's.
    assert found(EXACT + 300 * MB * (STEPS >= 60)).slope[0] == pytest.approx(0.2 * MB)


def test_less_growth_than_asked_for_is_no_leak():
    # 180 steps follow the warm-up, 179 intervals: 35.8 MB.
    assert found(EXACT, min_growth=35.7 * MB).rising[0]
    assert not found(EXACT, min_growth=35.9 * MB).rising[0]


def test_long_runs_are_averaged_and_keep_their_slope():
    steps = np.arange(5000.0)
    rising = found(noise(2, steps=5000) + np.array([[0.0], [0.05]]) * MB * steps)
    assert list(rising.rising) == [False, True]
    assert rising.slope[1] == pytest.approx(0.05 * MB, rel=0.05)
    assert MAX_POINTS < 5000 * 0.9


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="run at least 40"):
        found(EXACT[:39])


def test_what_the_tokens_explain_is_taken_out():
    tokens = 1000 + 10 * STEPS + np.random.default_rng(5).normal(0, 300, 200)
    # 0.02 MB a token, exactly: nothing is left but the mean.
    left = without_covariate(0.02 * MB * tokens, tokens)
    assert np.ptp(left) < 1
    # Memory that falls with the tokens is not theirs.
    np.testing.assert_array_equal(without_covariate(-tokens, tokens), -tokens)
    np.testing.assert_array_equal(without_covariate(EXACT, np.full(200, 7.0)), EXACT)
    # A leak that owes nothing to the tokens stays.
    steady = np.random.default_rng(6).normal(1000, 300, 200)
    assert found(without_covariate(EXACT + 0.02 * MB * steady, steady)).rising[0]


def test_a_leak_is_told_from_tokens_that_grow_beside_it():
    rng = np.random.default_rng(8)
    tokens = np.linspace(1000, 3000, 200) * rng.normal(1, 0.1, (100, 200))
    sound = 0.02 * MB * tokens + rng.normal(0, 5 * MB, (100, 200))
    assert found(without_covariate(sound, tokens)).rising.sum() <= 1
    assert found(without_covariate(sound + 0.3 * MB * STEPS, tokens)).rising.mean() > 0.9


def test_tokens_that_only_grow_explain_all_that_grows():
    left = without_covariate(EXACT, 1000 + 10 * STEPS)
    assert np.ptp(left) < 1 < np.ptp(EXACT)


def test_a_line_that_hardly_wavers_rises_however_it_wavers():
    wavering = 2 * MB * STEPS[:60] + MB * 0.2 * np.sin(STEPS[:60] / 8)
    assert find_trends(wavering[None], STEPS[:60]).rising[0]


def test_the_best_jump_is_taken_out_unless_a_line_is_better():
    series = np.stack([JUMP, EXACT, JUMP + EXACT])
    left = without_jump(series, STEPS)
    assert np.ptp(left[0]) < 1
    np.testing.assert_array_equal(left[1], EXACT)
    np.testing.assert_allclose(np.diff(left[2]), 0.2 * MB)


def test_the_bound_is_clopper_and_pearsons():
    # The rule of three: nothing in 1,000 bounds the share by 1 - 0.05 ** (1 / 1000).
    assert upper_bound(0.0, 1000) == pytest.approx(1 - 0.05**0.001)
    assert upper_bound(1.0, 10) == 1.0
