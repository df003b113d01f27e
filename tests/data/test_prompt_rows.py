"""What lines, records and positions become as prompts, and which are refused."""

import json
from pathlib import Path
from typing import Any

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_lines import BLACK_LINE, ENVIRONMENT_LINE, START, boards, write, write_records

from grpo.config.groups import PromptSettings
from grpo.data import Prompt, collate, load_prompts
from grpo.data.files import FORMATS
from grpo.data.intake import Intake
from rewards.formats import PADDED, PolicySample, environment_prompt, policy_line, policy_prompt


def test_lines_become_prompts_with_the_columns_rewards_read(tmp_path: Path, logged: list[str]) -> None:
    spec = write(tmp_path / "lines.txt", [BLACK_LINE, "", ENVIRONMENT_LINE])
    environment, policy = load_prompts(spec, seed=0, policy_share=0.5, heldout_share=0).draw(2)
    fen = "8/1p3pk1/p5p1/4p1b1/P1B1P3/1P3P2/2r3PP/3R2K1 b - - 1 30"
    assert policy == Prompt(
        "lines.txt:1",
        f"P: {fen}",
        {
            "task": "policy",
            "fen": fen,
            "moves": ["g5e3", "g5f4", "c2c3", "b7b6", "g7f6"],
            "evals": [3.1, 1.2, 1.1, 1.0, 0.9],
        },
    )
    assert environment == Prompt(
        "lines.txt:3",
        f"A: {START}+e2e4+e2e4+",
        {"task": "environment", "fen": START, "action": "e2e4", "history": ["e2e4"]},
    )
    assert sum("1 of 1 labelled policy lines" in message for message in logged) == 1  # trap 1


def test_best_moves_that_tie_for_the_highest_eval_are_not_upside_down() -> None:
    intake = Intake("data", max_bad_share=0)
    line = policy_line(PolicySample(START, ("e2e4", "d2d4", "a2a3"), (0.3, 0.3, -0.1), "d2d4"))
    FORMATS[".txt"][1](line, "id", intake)
    assert (intake.num_labelled, intake.num_upside_down) == (1, 0)
    FORMATS[".txt"][1](line.replace("B: d2d4", "B: a2a3"), "id", intake)
    FORMATS[".txt"][1](line.replace("B: d2d4", "B: h2h3"), "id", intake)
    assert (intake.num_labelled, intake.num_upside_down) == (3, 2)


def test_padded_and_plain_lines_give_the_same_prompt(tmp_path: Path) -> None:
    sample = PolicySample(START, ("e2e4", "d2d4"), (0.3, 0.2), "e2e4")
    lines = [policy_line(sample), policy_line(sample, widths=PADDED), policy_prompt(START)]
    drawn = load_prompts(write(tmp_path / "l.txt", lines), seed=0, heldout_share=0).draw(3)
    assert {p.text for p in drawn} == {policy_prompt(START)}
    labels = {p.id: p.columns["moves"] for p in drawn}
    assert labels == {"l.txt:1": ["e2e4", "d2d4"], "l.txt:2": ["e2e4", "d2d4"], "l.txt:3": None}


def test_the_trailing_space_is_a_setting_of_policy_prompts(tmp_path: Path) -> None:
    spec = write(tmp_path / "l.txt", [BLACK_LINE, ENVIRONMENT_LINE])
    environment, policy = load_prompts(
        spec, seed=0, policy_share=0.5, heldout_share=0, settings=PromptSettings(trailing_space=True)
    ).draw(2)
    assert policy.text.endswith("1 30 ") and environment.text.endswith("e2e4+")


BAD_LINES = {
    "hello": "starts with 'P:' or 'A:'",
    "P: 8/8/8/8/8/8/8/8": "not a FEN",
    "P: 9/8/8/8/8/8/8/8 w - - 0 1 M: e2e4 E: 0.1 B: e2e4": "invalid character in position",
    "P: 8/8/8/8/8/8/8/8 w - - 0 1": "not a possible position.*NO_WHITE_KING",
    "P: 4k3/8/8/8/8/8/4Q3/4K3 w - - 0 1": "not a possible position.*OPPOSITE_CHECK",
    "P: 4k3/8/8/8/8/8/8/4K3 w - - 0 1": "the game is over",
    "P: 7k/6Q1/6K1/8/8/8/8/8 b - - 0 1": "the game is over",
    f"P: {START} M: e2e4 d2d4 E: 0.1 B: e2e4": "missing or malformed",
    f"P: {START} M: e2e4 E: nan B: e2e4": "missing or malformed",
    f"P: {START} M: e2e4": "missing or malformed",
    f"P: {START} M: e2e5 E: 0.1 B: e2e5": "the best label, e2e5, is illegal",
    f"A: {START}+e2e4": "seven fields",
    f"A: {START}+e2e4+e2e4+{START}": "seven fields",
    f"A: {START}+0000+0000+": "not all UCI moves",
    f"A: {START}+e2e4+e4 e5+": "not all UCI moves",
    "A: startpos+e2e4+e2e4+": "not a FEN",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items())
def test_a_bad_line_is_skipped_and_shown_with_number_and_reason(
    tmp_path: Path, logged: list[str], line: str, reason: str
) -> None:
    spec = write(tmp_path / "lines.txt", [ENVIRONMENT_LINE] * 98 + [line, line])
    load_prompts(spec, seed=0, heldout_share=0, max_bad_share=0.02)
    (warning,) = [message for message in logged if message.startswith("WARNING")]
    assert "2 of 100 rows (2.0%)" in warning and "lines.txt:99: " in warning
    with pytest.raises(ValueError, match=rf"lines.txt:99: .*{reason}.*--max-bad-share 0.02"):
        load_prompts(spec, seed=0, max_bad_share=0.01)


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".fen"])
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_no_line_however_broken_raises(kind: str, data: st.DataObject) -> None:
    texts = st.text(alphabet=st.sampled_from("PA:+ 8/kKqQpP-wb0101e2e4MEB.;\"'{}[]é\n\0"), max_size=60)
    pieces = st.sampled_from(
        [BLACK_LINE, ENVIRONMENT_LINE, START, '{"fen": "', '", "moves": ', "bm Nf3;", '"}']
    )
    line = "".join(data.draw(st.lists(st.one_of(texts, pieces), max_size=4)))
    cut = data.draw(st.integers(0, len(line)))
    intake = Intake("data", max_bad_share=0)
    for text in (line, line[:cut]):
        prompts = intake.prompts("data:1", text, FORMATS[kind][1])
        assert all(isinstance(prompt.text, str) for prompt in prompts)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        7,
        [],
        {},
        "nan",
        [None],
        ["e2e4"],
        ["e2e4", 3],
        [1e400],
        [10**400],
        [[1]],
        "e2e4",
        True,
        {"a": 1},
    ],
)
@pytest.mark.parametrize("name", ["prompt", "text", "fen", "moves", "evals", "action", "history"])
def test_no_record_however_broken_raises(name: str, value: Any) -> None:
    intake = Intake("data", max_bad_share=0)
    record = {"fen": START, "moves": ["e2e4"], "evals": [0.1], name: value}
    for row in (record, record | {"action": "e2e4"}, {name: value}):
        for prompt in intake.prompts("data:1", row, FORMATS[".parquet"][1]):
            collate([prompt])


def test_a_text_column_holds_rookworld_lines(tmp_path: Path) -> None:
    records = [{"text": line, "source": "x"} for line in (BLACK_LINE, ENVIRONMENT_LINE)]
    path = write_records(tmp_path / "lines.jsonl", records)
    tasks = {p.task: p for p in load_prompts(path, seed=0, heldout_share=0).draw(2)}
    assert tasks.keys() == {"policy", "environment"}
    assert tasks["policy"].columns["source"] == "x" and tasks["policy"].id == "lines.jsonl:1"


def test_a_fen_column_with_labels_or_an_action(tmp_path: Path) -> None:
    after = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1"  # as some tools write it
    records = [
        {"fen": START},
        {"fen": START, "moves": "e2e4 d2d4", "evals": [0.3, 0.2]},
        {"fen": after, "action": "e7e5"},
        {"fen": after, "action": "e7e5", "history": ["e2e4", "e7e5"]},
    ]
    source = load_prompts(write_records(tmp_path / "p.jsonl", records), seed=0, heldout_share=0)
    drawn = {p.id: p for p in source.draw(8)}
    clean = after.replace(" e3 ", " - ")
    assert drawn["p.jsonl:1"].columns["moves"] is None and drawn["p.jsonl:1"].task == "policy"
    assert drawn["p.jsonl:2"].columns["moves"] == ["e2e4", "d2d4"]
    assert drawn["p.jsonl:2"].columns["evals"] == [0.3, 0.2]
    assert drawn["p.jsonl:3"].text == environment_prompt(clean, "e7e5", ["e7e5"])
    assert drawn["p.jsonl:4"].text == environment_prompt(clean, "e7e5", ["e2e4", "e7e5"])


def test_castling_is_written_by_the_kings_step_whatever_came_in(tmp_path: Path) -> None:
    """In labels, actions and what of the history is castling: a rook may go from e8 to h8, too."""
    both = "r3k2r/pppppppp/8/8/8/8/PPPPPPPP/R3K2R w KQkq - 0 1"
    later = "4rr1k/pppppppp/8/8/8/8/PPPPPPPP/1K1R3R w - - 6 4"  # e8h8 the king's, then e1a1, a8e8, c1b1
    rooks = "r3k3/pppppppp/7r/8/8/8/PPPPPPPP/R3K2R w KQq - 6 4"  # a rook from e8 to h8, and on to h6
    records = [
        {"fen": both, "moves": "e1h1 e1a1 a2a3", "evals": [0.3, 0.2, 0.1]},
        {"fen": both, "action": "e1h1", "history": ["e1g1"]},
        {"fen": later, "action": "b1a1", "history": ["e8h8", "e1a1", "a8e8", "c1b1", "g8h8", "b1a1"]},
        {"fen": rooks, "action": "e1a1", "history": ["e8h8", "a1b1", "h8h6", "e1a1"]},
        {"text": f"A: {both}+e1a1+e1a1+"},
    ]
    source = load_prompts(write_records(tmp_path / "p.jsonl", records), seed=0, heldout_share=0)
    columns = {p.id.rpartition(":")[2]: p.columns for p in source.draw(20)}
    assert columns["1"]["moves"] == ["e1g1", "e1c1", "a2a3"]
    assert (columns["2"]["action"], columns["2"]["history"]) == ("e1g1", ["e1g1"])
    assert columns["3"]["history"] == ["e8g8", "e1c1", "a8e8", "c1b1", "g8h8", "b1a1"]
    assert columns["4"]["history"] == ["e8h8", "a1b1", "h8h6", "e1c1"]
    assert columns["5"]["action"] == "e1c1"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"question": "?"}, "none of the columns .*: name one of question with --prompt-column"),
        ({"prompt": {"role": "user", "content": "hi"}}, "`prompt` is dict, and neither text nor a list"),
        ({"prompt": " "}, "`prompt` is empty"),
        ({"prompt": "hi", "completions": "x"}, "rename column `completions`"),
        ({"prompt": "hi", "task": "policy"}, "rename column `task`: 'policy' in it means a chess prompt"),
        ({"prompt": "hi", "task": "environment"}, "rename column `task`: 'environment'"),
        ({"fen": START, "moves": ["e2e4"]}, "1 moves and 0 evals"),
        ({"fen": START, "moves": ["e2e4"], "evals": [float("nan")]}, "not all finite"),
        ({"fen": START, "action": "e2e4", "history": ["d2d4"]}, "ends with the action"),
        ({"fen": "castle"}, "expected 8 rows"),
        ([1], "not a JSON object"),
    ],
)
def test_a_bad_record_says_why(tmp_path: Path, record: Any, reason: str) -> None:
    path = write(tmp_path / "mine.jsonl", [json.dumps(record)])
    with pytest.raises(ValueError, match=rf"1 of 1 rows.*mine.jsonl:1: .*{reason}") as error:
        load_prompts(path, seed=0)
    assert str(error.value).endswith(": repair them, or give other --prompts")  # no share of them is enough


def test_a_task_of_ones_own_reaches_the_rewards_and_is_no_chess(tmp_path: Path) -> None:
    records = [{"prompt": "2 + 2 =", "task": "sums"}, {"prompt": "Hi.", "task": ["a", "list"]}]
    drawn = load_prompts(write_records(tmp_path / "p.jsonl", records), seed=0, heldout_share=0).draw(2)
    assert {p.task for p in drawn} == {"custom"}
    assert {str(p.columns["task"]) for p in drawn} == {"sums", "['a', 'list']"}
    path = write_records(tmp_path / "f.jsonl", [{"fen": START, "task": "openings"}])
    assert load_prompts(path, seed=0, heldout_share=0).draw(1)[0].task == "policy"


def test_broken_json_is_a_bad_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ['{"prompt": "a"', '{"prompt": "b"}'])
    with pytest.raises(ValueError, match=r"1 of 2 rows \(50.0%\).*mine.jsonl:1: .*--max-bad-share 0.5"):
        load_prompts(path, seed=0)
    (prompt,) = load_prompts(path, seed=0, max_bad_share=0.5, heldout_share=0).draw(1)
    assert prompt.id == "mine.jsonl:2"


def test_positions_make_a_policy_and_an_environment_prompt_each(tmp_path: Path) -> None:
    lines = [
        "# openings",
        START,
        "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5Q2/PPPP1PPP/RNB1K1NR w KQkq - bm Qxf7#; id 7;",
    ]
    for name in ("p.fen", "p.EPD"):
        source = load_prompts(write(tmp_path / name, lines), seed=0, policy_share=0.5, heldout_share=0)
        drawn = {p.id: p for p in source.draw(4)}
        assert set(drawn) == {f"{name}:{n}:{task}" for n in (2, 3) for task in ("policy", "environment")}
        assert drawn[f"{name}:3:policy"].columns["fen"].endswith("KQkq - 0 1")
        environment = drawn[f"{name}:2:environment"]
        action = environment.columns["action"]
        assert chess.Board().is_legal(chess.Move.from_uci(action))
        assert environment.columns["history"] == [action]
        assert environment.text == f"A: {START}+{action}+{action}+"


def test_the_random_move_belongs_to_the_position(tmp_path: Path) -> None:
    fens = [board.fen() for board in boards(30)]

    def moves(seed: int, lines: list[str]) -> dict[str, str]:
        source = load_prompts(write(tmp_path / "p.fen", lines), seed=seed, policy_share=0.0, heldout_share=0)
        return {p.columns["fen"]: p.columns["action"] for p in source.draw(30)}

    assert moves(0, fens) == moves(1, fens[::-1])
    assert len(set(moves(0, fens).values())) > 10
