"""What a match says of two players' strength: score, Elo difference, and how sure one can be of it."""

import math
from typing import NamedTuple

from grpo.evaluate.evaluation import LEVEL_Z


class Score(NamedTuple):
    """Games as the first player sees them."""

    wins: int
    draws: int
    losses: int

    @property
    def games(self) -> int:
        return sum(self)

    @property
    def share(self) -> float:
        """Points a game: a win is 1, a draw a half."""
        return (self.wins + self.draws / 2) / self.games

    @property
    def interval(self) -> tuple[float, float]:
        """95 % score interval of the expected points a game.

        Wilson's (1927) for three outcomes: the ends are where the share lies z deviations away, with the
        variance of a game s(1 - s) - d/4 at an expected score s and a share d of draws. As d that of the
        games would be zero wide where all were drawn: it is taken of z² games more, none of them drawn.
        """
        n, s, z2 = self.games, self.share, LEVEL_Z**2
        drawn = self.draws / (n + z2)
        middle = s + z2 / (2 * n)
        reach = math.sqrt(z2 / n * (s * (1 - s) + z2 / (4 * n) - drawn / 4 * (1 + z2 / n)))
        low, high = ((middle + sign * reach) / (1 + z2 / n) for sign in (-1, 1))
        return max(0.0, low), min(1.0, high)

    def share_in_words(self) -> str:
        """64.2 % (57.4 to 70.5)."""
        low, high = self.interval
        return f"{100 * self.share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

    def elo_in_words(self) -> str:
        """The first player's lead: +12 (-35 to +60), infinite where all games were won or lost."""
        elo, low, high = map(elo_difference, (self.share, *self.interval))
        return f"{elo:+.0f} ({low:+.0f} to {high:+.0f})"


def elo_difference(share: float) -> float:
    """Points of Elo at which so much is expected: 400 log10(s / (1 - s)) (Elo, 1978)."""
    if share in (0.0, 1.0):
        return math.copysign(math.inf, share - 0.5)
    return 400 * math.log10(share / (1 - share)) + 0.0
