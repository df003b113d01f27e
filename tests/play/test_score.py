"""Elo and its interval: against figures worked out by hand, and against matches whose truth is known."""

import math

import numpy as np
import pytest

from grpo.play.score import Score, elo_difference


def test_the_elo_difference_is_the_book_s():
    """FIDE's table of the same formula: 64 % is a difference of 100, 76 % of 200, 91 % of 400."""
    assert [round(elo_difference(share)) for share in (0.64, 0.76, 0.91)] == [100, 200, 402]
    assert elo_difference(0.5) == 0 and str(elo_difference(0.5)) == "0.0"
    assert elo_difference(0.25) == -elo_difference(0.75)


def test_score_and_interval_are_those_worked_out_by_hand():
    """40 won, 30 drawn, 30 lost: s = 0.55; z² = 3.8415, z²/n = 0.038415; d = 30 / 103.8415 = 0.28890.

    Under the root 0.038415 (0.2475 + 0.0096037 - 0.072225 × 1.038415) = 0.0069953, whose root is 0.083638;
    (0.55 + 0.0192074 ± 0.083638) / 1.038415 = 0.467607 and 0.628694; 400 log10(s / (1 - s)) of these.
    """
    score = Score(40, 30, 30)
    assert score.games == 100 and score.share == pytest.approx(0.55)
    assert score.interval == pytest.approx((0.467607, 0.628694), abs=2e-5)
    assert score.elo == pytest.approx(34.86, abs=0.01)  # 400 log10(0.55 / 0.45)
    assert score.elo_interval == pytest.approx((-22.54, 91.47), abs=0.05)
    assert score.elo_in_words() == "+35 (-23 to +91)"


def test_without_draws_it_is_wilsons():
    """8 of 10 in the book's example: 0.490 to 0.943."""
    assert Score(8, 0, 2).interval == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_few_or_equal_games_leave_much_open():
    for score in (Score(10, 0, 0), Score(0, 10, 0), Score(0, 0, 1)):
        low, high = score.interval
        assert high - low > 0.2 and 0 <= low <= score.share <= high <= 1
    assert Score(10, 0, 0).elo == math.inf and Score(10, 0, 0).elo_interval[1] == math.inf
    assert Score(10, 0, 0).elo_in_words().startswith("+inf (+1")
    assert Score(0, 0, 10).elo == -math.inf


@pytest.mark.parametrize(
    ("games", "chances"),
    [(20, (0.4, 0.2, 0.4)), (50, (0.3, 0.4, 0.3)), (100, (0.6, 0.2, 0.2)), (100, (0.4, 0.2, 0.4)),
     (200, (0.85, 0.1, 0.05)), (200, (0.1, 0.8, 0.1)), (1000, (0.5, 0.3, 0.2))],
)  # fmt: skip
def test_the_interval_holds_the_truth_in_95_percent_of_matches(games, chances):
    truth = elo_difference(chances[0] + chances[1] / 2)
    matches = np.random.default_rng(0).multinomial(games, chances, size=4000).tolist()
    held = 0
    for match in matches:
        low, high = Score(*match).elo_interval
        held += low <= truth <= high
    assert 0.94 <= held / len(matches) <= 0.97
