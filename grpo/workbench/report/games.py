"""What a run's matches say of its strength, and three of its games as boards."""

from collections.abc import Sequence

import chess

from grpo.play.record import Match
from grpo.workbench.report.boards import draw_position
from grpo.workbench.report.sections import Card, Section, Table
from grpo.workbench.report.wording import NOTHING, plural

SHOWN = 3


def games_section(matches: Sequence[Match]) -> Section:
    """All matches in a table; games of the last one."""
    played = [match for match in matches if match.finished]
    if not played:
        return Section("Games")
    columns = (
        "against", "how", "games", "won", "drawn", "lost", "score", "Elo difference", "illegal a game",
        "first at",
    )  # fmt: skip
    rows = [_row(match) for match in played]
    caption = (
        "Intervals are 95 %. Illegal answers, and the half-move of the first one (median), are this model's."
    )
    shown = [_card(played[-1], number) for number in chosen(played[-1])]
    sentences = [_in_words(match) for match in played]
    return Section("Games", sentences, [Table(columns, rows, caption)], cards=shown, row=SHOWN)


def _row(match: Match) -> tuple[str, ...]:
    score, first = match.score, match.first_illegal(0)
    return (
        match.players[1], _how(match), *map(str, (score.games, *score)), score.share_in_words(),
        score.elo_in_words(), f"{match.illegal_a_game(0):.2f}", NOTHING if first is None else f"{first:g}",
    )  # fmt: skip


def _how(match: Match) -> str:
    """greedy, illegal answers lose."""
    temperature, nodes = match.settings.get("temperature"), match.settings.get("nodes")
    parts = [f"temperature {temperature:g}" if isinstance(temperature, float) and temperature else "greedy"]
    parts += [f"{nodes} nodes"] if nodes else []
    parts += ["illegal answers lose"] if match.settings.get("illegal_moves") == "resign" else []
    return ", ".join(parts)


def _in_words(match: Match) -> str:
    low, high = match.score.interval
    verdict = "stronger" if low > 0.5 else "weaker" if high < 0.5 else "too close to tell"
    return (
        f"{match.players[0]} scored {100 * match.score.share:.1f} % against {match.players[1]} in "
        f"{plural(match.score.games, 'game')} ({_how(match)}): {verdict}."
    )


def chosen(match: Match) -> list[int]:
    """Indices of games to show: the longest won, lost and drawn ones, if there are any, then others."""
    over = [number for number, game in enumerate(match.games) if game.is_over]
    longest = sorted(over, key=lambda number: -len(match.games[number].moves))
    each = {match.games[number].points: number for number in reversed(longest)}
    picked = [*each.values(), *(number for number in longest if number not in each.values())]
    return sorted(picked[:SHOWN])


def _card(match: Match, number: int) -> Card:
    game = match.games[number]
    white, black = match.players if game.first_is_white else match.players[::-1]
    moves = [chess.Move.from_uci(move) for move in game.moves]
    ends = ((chess.Board(game.fen), game.moves[:1], "at first"), (game.board, game.moves[-1:], game.ending))
    boards = [
        draw_position(board, "".join(move), f"game-{number}-{place}", caption, coordinates=False)
        for place, (board, move, caption) in enumerate(ends)
    ]
    illegal = game.illegal(0)
    remark = f"Illegal answers at half-move {', '.join(map(str, illegal))}." if illegal else ""
    title = f"game {number + 1}: {white} against {black}, {game.result}"
    return Card(title, boards, game.fen, chess.Board(game.fen).variation_san(moves), (), remark)
