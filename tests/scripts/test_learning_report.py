import numpy as np
import pytest
from benchmarks.learning_report import fallen, seed_bootstrap

from grpo.evaluate import Evaluation


def scores(**columns):
    return Evaluation(
        {name: np.asarray(values, float) for name, values in columns.items()}, dict.fromkeys(columns, "")
    )


def test_the_bootstrap_is_around_the_mean_change_and_as_wide_as_seeds_and_prompts_differ():
    before = scores(a=np.zeros(400))
    after = [scores(a=np.full(400, level)) for level in (0.1, 0.3)]
    means = seed_bootstrap(before, after, "a")
    # Only the seeds differ: two draws of 0.1 or 0.3, so the means are 0.1, 0.2, 0.2, 0.3.
    assert sorted({round(float(mean), 6) for mean in means}) == [0.1, 0.2, 0.3]
    assert np.mean(np.isclose(means, 0.2)) == pytest.approx(0.5, abs=0.03)

    rng = np.random.default_rng(0)
    change = rng.normal(0.05, 0.4, 1000)
    one = seed_bootstrap(scores(a=np.zeros(1000)), [scores(a=change)], "a")
    assert one.mean() == pytest.approx(change.mean(), abs=1e-3)
    assert one.std() == pytest.approx(0.4 / np.sqrt(1000), rel=0.05)


def test_a_column_has_fallen_only_when_it_is_surely_below_minus_two_points():
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 0.3, 1000) - 0
    noise -= noise.mean()
    before = scores(lost=np.zeros(1000), a_bit=np.zeros(1000), risen=np.zeros(1000))
    after = [scores(lost=noise - 0.06, a_bit=noise - 0.03, risen=noise + 0.06) for _ in range(5)]
    # The standard error is 0.95 points: -6 is sure to be below -2, -3 is not.
    assert fallen(before, after, ["lost", "a_bit", "risen"]) == ["lost"]


def test_holm_asks_more_of_the_first_of_many_columns():
    rng = np.random.default_rng(2)
    noise = rng.normal(0, 0.3, 1000)
    noise -= noise.mean()
    columns = {f"c{i}": noise - (0.0395 if i == 0 else 0) for i in range(10)}
    before = scores(**{name: np.zeros(1000) for name in columns})
    after = [scores(**columns)]
    assert fallen(before, after, ["c0"]) == ["c0"]  # p is about 0.02: enough alone,
    assert fallen(before, after, list(columns)) == []  # not among ten
