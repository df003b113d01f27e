"""Kinds of files: JSON lines, parquet, games."""

from pathlib import Path

import pytest
from prompt_lines import START, write_records

from grpo.data import load_prompts
from rewards.environment import referee


def test_a_jsonl_of_ones_own_prompts_keeps_every_column(tmp_path: Path) -> None:
    records = [{"prompt": "2 + 2 =", "answer": "4", "level": 1}, {"prompt": "Name a colour.", "fen": None}]
    source = load_prompts(
        write_records(tmp_path / "mine.jsonl", records), seed=0, policy_share=1.0, heldout_share=0
    )
    drawn = {p.id: p for p in source.draw(2)}
    assert drawn["mine.jsonl:1"].text == "2 + 2 ="
    assert drawn["mine.jsonl:1"].columns == {"task": "custom", "answer": "4", "level": 1, "fen": None}
    assert drawn["mine.jsonl:2"].columns == {"task": "custom", "answer": None, "level": None, "fen": None}


def test_parquet_has_the_columns_of_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [
        {"fen": START, "moves": ["e2e4", "d2d4"], "evals": [0.3, 0.2], "action": None},
        {"fen": START, "moves": None, "evals": None, "action": "e2e4"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "p.parquet", row_group_size=1)
    write_records(tmp_path / "p.jsonl", records)
    one, other = (
        {
            p.id.split(":")[1]: (p.text, p.columns)
            for p in load_prompts(str(path), seed=0, heldout_share=0).draw(2)
        }
        for path in (tmp_path / "p.parquet", tmp_path / "p.jsonl")
    )
    assert one == other and set(one) == {"1", "2"}
    (tmp_path / "no.parquet").write_text("hello")
    with pytest.raises(ValueError, match=r"no.parquet is not a parquet file"):
        load_prompts(str(tmp_path / "no.parquet"), seed=0)


def test_a_game_gives_positions_and_moves_with_their_real_history(tmp_path: Path) -> None:
    moves = ["e4", "e5", "Nf3", "Nc6", "Bb5", "a6", "Ba4", "Nf6", "O-O", "Be7", "Re1", "b5"]
    game = '[Event "?"]\n\n' + " ".join(moves) + " (12... d6) {a comment} *\n\n"
    mate = '[Event "?"]\n\n1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4. Qxf7# 1-0\n'
    (tmp_path / "games.pgn").write_text(game + mate)
    source = load_prompts(str(tmp_path / "games.pgn"), seed=0, policy_share=0.5, heldout_share=0)
    drawn = {p.id: p for p in source.draw(100)}
    assert "games.pgn:2.0:policy" not in drawn  # the same text as games.pgn:1.0:policy
    assert drawn["games.pgn:1.0:policy"].columns["fen"] == START
    assert "games.pgn:1.12:policy" in drawn  # after the last move
    assert "games.pgn:2.7:policy" not in drawn  # mate
    last = drawn["games.pgn:1.11:environment"].columns
    assert last["action"] == "b7b5"
    assert " ".join(last["history"]) == "g1f3 b8c6 f1b5 a7a6 b5a4 g8f6 e1g1 f8e7 f1e1 b7b5"
    assert referee(last["fen"], last["action"]).truncated is False
    assert drawn["games.pgn:2.6:environment"].columns["history"][-1] == "h5f7"


@pytest.mark.parametrize(
    ("game", "reason"),
    [
        ("1. e4 e5 2. Ke3 *", "illegal san: 'Ke3'"),
        ('[Variant "Atomic"]\n\n1. e4 *', "not standard chess"),
        ('[FEN "hello"]\n\n1. e4 *', "expected 8 rows"),
        ("1. e4 -- 2. d4 *", "null move"),
    ],
)
def test_a_bad_game_is_counted(
    tmp_path: Path, game: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = '[Event "?"]\n\n1. e4 e5 *\n\n'
    (tmp_path / "games.pgn").write_text(
        good + (game if game[0] == "[" else f'[Event "?"]\n\n{game}') + "\n\n"
    )
    with pytest.raises(ValueError, match=rf"1 of 2 rows.*games.pgn:2: .*{reason}"):
        load_prompts(str(tmp_path / "games.pgn"), seed=0)
    assert not caplog.records  # python-chess logs to stderr on its own
