import importlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import chess
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loguru import logger

from grpo.prompts import Prompt, PromptSource, collate, is_heldout, load_prompts
from grpo.prompts import hub as hub_module
from grpo.prompts import load as load_module
from grpo.prompts.files import FORMATS
from grpo.prompts.rows import Intake
from grpo.prompts.source import MemoryLane
from grpo.prompts.split import position
from rewards.environment import referee
from rewards.formats import (
    PADDED,
    EnvironmentSample,
    PolicySample,
    environment_line,
    environment_prompt,
    policy_line,
    policy_prompt,
)

START = chess.STARTING_FEN
BLACK_LINE = (  # a published line: B: is the lowest eval, Black is to move
    "P: 8/1p3pk1/p5p1/4p1b1/P1B1P3/1P3P2/2r3PP/3R2K1 b - - 1 30".ljust(93)
    + "M: g5e3 g5f4 c2c3 b7b6 g7f6 ".ljust(30)
    + "E: 3.1 1.2 1.1 1.0 0.9 ".ljust(40)
    + "B: g7f6"
)
ENVIRONMENT_LINE = (
    "A: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1+e2e4+e2e4+"
    "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1+0.001+0+0"
)
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def logged() -> Iterator[list[str]]:
    messages: list[str] = []
    sink = logger.add(messages.append, format="{level} {message}")
    yield messages
    logger.remove(sink)


def boards(count: int, seed: int = 0) -> list[chess.Board]:
    """Positions of random games, none over, no two alike."""
    rng = random.Random(seed)
    found: dict[str, chess.Board] = {}
    board = chess.Board()
    while len(found) < count:
        board = chess.Board() if board.is_game_over() or board.ply() > 60 else board
        board.push(rng.choice(list(board.legal_moves)))
        if board.ply() > 4 and not board.is_game_over():
            found[board.epd()] = board.copy()
    return list(found.values())


def game_lines(num_policy: int, num_environment: int, seed: int = 0) -> list[str]:
    """RookWorld lines, both tasks on the same positions, shuffled together."""
    rng = random.Random(seed)
    positions = boards(max(num_policy, num_environment), seed)
    lines = []
    for board in positions[:num_policy]:
        moves = [move.uci() for move in board.legal_moves][:5]
        evals = tuple(rng.randint(-300, 300) / 100 for _ in moves)
        best = moves[evals.index(max(evals))]
        lines.append(policy_line(PolicySample(board.fen(), tuple(moves), evals, best), widths=PADDED))
    for board in positions[:num_environment]:
        history = [move.uci() for move in board.move_stack[-9:]]
        action = next(iter(board.legal_moves)).uci()
        answer = referee(board.fen(), action)
        lines.append(environment_line(EnvironmentSample(board.fen(), action, (*history, action), *answer)))
    rng.shuffle(lines)
    return lines


def write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def write_records(path: Path, records: Iterable[Any]) -> str:
    return write(path, [json.dumps(record) for record in records])


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def only(source: PromptSource) -> Prompt:
    (prompt,) = source.draw(1)
    return prompt


# ------------------------------------------------------------------------------------ the split


def test_the_split_is_a_property_of_the_position_and_not_of_the_counters() -> None:
    fens = [board.fen() for board in boards(400)]
    assert {is_heldout(fen) for fen in fens} == {True, False}
    for fen in fens:
        assert is_heldout(fen) == is_heldout(" ".join(fen.split()[:4]) + " 49 99")
    assert 0.3 < sum(is_heldout(fen, 0.4) for fen in fens) / 400 < 0.5
    # printf '<first four fields>' | sha256sum begins with 05bd4852: 0x05bd4852 / 2**32 = 0.02242
    assert is_heldout(START, 0.02243) and not is_heldout(START, 0.02241)


def test_an_en_passant_square_nobody_can_use_does_not_move_a_position_to_the_other_side() -> None:
    after_e4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq"
    written, left_out = (Prompt("", "", {"fen": f"{after_e4} {square} 0 1"}) for square in ("e3", "-"))
    assert position(written) == position(left_out) == f"{after_e4} -"
    usable = "rnbqkbnr/ppp1pppp/8/8/3pP3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 3"
    assert position(Prompt("", "", {"fen": usable})).endswith(" e3")


@settings(QUIET, max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.05, 0.6))
def test_no_position_is_on_both_sides_whichever_task(tmp_path: Path, seed: int, share: float) -> None:
    spec = write(tmp_path / "lines.txt", game_lines(20, 20, seed % 50))
    source = load_prompts(spec, seed=seed, policy_share=0.5, heldout_share=share)
    drawn = source.draw(100)  # more than an epoch of each task
    assert not {p.columns["fen"] for p in drawn} & {p.columns["fen"] for p in source.heldout}
    assert {p.id for p in drawn} | {p.id for p in source.heldout} == {f"lines.txt:{n}" for n in range(1, 41)}


def test_the_heldout_side_is_the_same_for_every_seed_and_limited_by_task(tmp_path: Path) -> None:
    spec = write(tmp_path / "lines.txt", game_lines(100, 60))
    sources = [load_prompts(spec, seed=seed, heldout_share=0.3, heldout_count=7) for seed in (1, 2)]
    assert sources[0].heldout == sources[1].heldout
    assert Counter(p.task for p in sources[0].heldout) == {"policy": 7, "environment": 7}
    everything = load_prompts(spec, seed=1, heldout_share=0.3).heldout
    fens = {p.columns["fen"] for p in everything}
    assert not fens & {p.columns["fen"] for p in sources[0].draw(200)}  # dropped, not trained on
    numbers = [int(p.id.split(":")[1]) for p in everything]
    assert numbers == sorted(numbers)


def test_prompts_without_a_position_are_split_by_all_of_their_text(tmp_path: Path) -> None:
    records = [{"prompt": f"Write a short poem about {n}"} for n in range(300)]
    source = load_prompts(write_records(tmp_path / "mine.jsonl", records), seed=0, heldout_share=0.2)
    assert 30 < len(source.heldout) < 90  # the first four words alone would give 0 or 300
    assert not {p.text for p in source.heldout} & {p.text for p in source.draw(300)}


# ------------------------------------------------------------------------------------ the order


@QUIET
@given(st.integers(1, 12), st.integers(0, 99), st.integers(1, 4))
def test_each_row_comes_once_an_epoch_in_a_new_order(count: int, seed: int, epochs: int) -> None:
    prompts = [Prompt(f"row:{n}", str(n), {}) for n in range(count)]
    lane = MemoryLane(prompts, seed=seed, task="custom")
    orders = [[lane.take().id for _ in range(count)] for _ in range(epochs)]
    assert all(sorted(order) == sorted(ids(prompts)) for order in orders)


def test_the_longest_prompts_are_known_for_each_lane_and_drawing_goes_on() -> None:
    def lane(task: str, *lengths: int) -> MemoryLane:
        return MemoryLane([Prompt(f"{task}:{n}", "x" * n, {}) for n in lengths], seed=0, task=task)

    def source(**lanes: Any) -> PromptSource:
        return PromptSource(lanes, [Prompt("held", "xxx", {})], seed=0, policy_share=0.5, rows_digest="")

    made = source(policy=lane("policy", 3, 9, 1, 7), environment=lane("environment", 2, 4))
    drawn = made.draw(3)
    assert ids(made.longest(2)) == ["policy:9", "policy:7", "environment:4", "environment:2"]
    again = source(policy=lane("policy", 3, 9, 1, 7), environment=lane("environment", 2, 4))
    assert drawn + made.draw(3) == again.draw(6)
    assert ids(source().longest(2)) == ["held"]  # of a stream, that is all that is known


def test_the_order_depends_on_seed_and_epoch() -> None:
    prompts = [Prompt(f"row:{n}", str(n), {}) for n in range(50)]
    lanes = [MemoryLane(prompts, seed=seed, task="custom") for seed in (0, 0, 1)]
    first, again, other = ([lane.take().id for _ in range(100)] for lane in lanes)
    assert first == again != other
    assert first[:50] != first[50:]
    assert first[:50] != ids(prompts)


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("prompts") / "mixed.txt", game_lines(30, 12))


@QUIET
@given(
    st.integers(0, 50),
    st.lists(st.integers(0, 20), max_size=6),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_a_restored_source_goes_on_as_if_nothing_had_happened(
    mixed_file: str, seed: int, before: list[int], after: list[int], share: float | None
) -> None:
    source = load_prompts(mixed_file, seed=seed, policy_share=share)
    for count in before:
        source.draw(count)
    state = json.loads(json.dumps(source.state()))
    expected = [source.draw(count) for count in after]
    resumed = load_prompts(mixed_file, seed=seed, policy_share=share)
    resumed.draw(3)
    resumed.restore(state)
    assert resumed.state() == state
    assert [resumed.draw(count) for count in after] == expected
    assert resumed.state() == source.state()


def test_how_draws_are_cut_does_not_matter(mixed_file: str) -> None:
    one, other = (load_prompts(mixed_file, seed=3, policy_share=0.3) for _ in range(2))
    assert one.draw(60) == [prompt for count in (1, 7, 0, 52) for prompt in other.draw(count)]


def test_a_checkpoint_of_other_rows_or_another_seed_is_refused(mixed_file: str, tmp_path: Path) -> None:
    state = load_prompts(mixed_file, seed=3).state()
    with pytest.raises(ValueError, match=r"seed 3, not 4"):
        load_prompts(mixed_file, seed=4).restore(state)
    fewer = write(tmp_path / "mixed.txt", Path(mixed_file).read_text().splitlines()[:-1])
    with pytest.raises(ValueError, match=r"same --prompts"):
        load_prompts(fewer, seed=3).restore(state)
    moved = write(tmp_path / "mixed.txt", Path(mixed_file).read_text().splitlines())
    load_prompts(moved, seed=3).restore(state)  # the folder does not matter


@QUIET
@given(st.floats(0, 1), st.integers(1, 80))
def test_the_mix_is_even_at_every_point(mixed_file: str, share: float, count: int) -> None:
    tasks = [p.task for p in load_prompts(mixed_file, seed=0, policy_share=share).draw(count)]
    for drawn in range(1, count + 1):
        assert abs(tasks[:drawn].count("policy") - share * drawn) < 1 + 1e-9


def test_each_task_keeps_its_order_whatever_the_share(mixed_file: str) -> None:
    def policies(share: float, count: int) -> list[str]:
        source = load_prompts(mixed_file, seed=0, policy_share=share)
        return [p.id for p in source.draw(count) if p.task == "policy"]

    assert policies(0.5, 40)[:20] == policies(1.0, 20) == policies(0.25, 80)[:20]


def test_without_a_share_tasks_come_as_often_as_in_the_data(mixed_file: str) -> None:
    source = load_prompts(mixed_file, seed=0, heldout_share=0.0)
    assert source.heldout == []
    assert Counter(p.task for p in source.draw(42)) == {"policy": 30, "environment": 12}


def test_a_share_of_one_task_is_moot_and_said_once(tmp_path: Path, logged: list[str]) -> None:
    spec = write(tmp_path / "lines.txt", game_lines(20, 0))
    source = load_prompts(spec, seed=0, policy_share=0.25, heldout_share=0)
    assert {p.task for p in source.draw(20)} == {"policy"}
    assert sum("plays no part" in message for message in logged) == 1


@pytest.mark.parametrize(("policy", "environment", "share"), [(9, 0, 0.0), (0, 9, 1.0)])
def test_a_share_of_a_missing_task_is_an_error(
    tmp_path: Path, policy: int, environment: int, share: float
) -> None:
    spec = write(tmp_path / "lines.txt", game_lines(policy, environment))
    with pytest.raises(
        ValueError, match=rf"--policy-share {share:g} asks .*use --policy-share {1 - share:g}"
    ):
        load_prompts(spec, seed=0, policy_share=share, heldout_share=0)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("name", ["policy_share", "heldout_share", "max_bad_share"])
def test_shares_are_between_0_and_1(mixed_file: str, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"a share is between 0 and 1"):
        load_prompts(mixed_file, seed=0, **{name: value})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ lines


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
    intake = Intake("data", max_bad_share=0, trailing_space=False)
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
        spec, seed=0, policy_share=0.5, heldout_share=0, trailing_space=True
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
    intake = Intake("data", max_bad_share=0, trailing_space=False)
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
    intake = Intake("data", max_bad_share=0, trailing_space=False)
    record = {"fen": START, "moves": ["e2e4"], "evals": [0.1], name: value}
    for row in (record, record | {"action": "e2e4"}, {name: value}):
        for prompt in intake.prompts("data:1", row, FORMATS[".parquet"][1]):
            collate([prompt])


# ------------------------------------------------------------------------------------ files


def test_a_jsonl_of_ones_own_prompts_keeps_every_column(tmp_path: Path) -> None:
    records = [{"prompt": "2 + 2 =", "answer": "4", "level": 1}, {"prompt": "Name a colour.", "fen": None}]
    source = load_prompts(
        write_records(tmp_path / "mine.jsonl", records), seed=0, policy_share=1.0, heldout_share=0
    )
    drawn = {p.id: p for p in source.draw(2)}
    assert drawn["mine.jsonl:1"].text == "2 + 2 ="
    assert drawn["mine.jsonl:1"].columns == {"task": "custom", "answer": "4", "level": 1, "fen": None}
    assert drawn["mine.jsonl:2"].columns == {"task": "custom", "answer": None, "level": None, "fen": None}


def test_collate_gives_every_column_a_value_for_every_prompt(mixed_file: str) -> None:
    prompts = load_prompts(mixed_file, seed=0, policy_share=0.5).draw(4)
    columns = collate(prompts)
    assert list(columns) == ["task", "fen", "moves", "evals", "action", "history"]
    assert columns["task"] == ["environment", "policy"] * 2
    assert [moves is None for moves in columns["moves"]] == [True, False, True, False]
    assert [action is None for action in columns["action"]] == [False, True, False, True]
    assert list(collate(prompts[:1])) == list(columns)  # also where a draw has one task alone
    assert collate([]) == {}
    assert collate([Prompt("a", "x", {"b": 1}), Prompt("c", "y", {"d": 2})]) == {
        "b": [1, None],
        "d": [None, 2],
    }


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


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"question": "?"}, "none of the columns `prompt`, `text`, `fen`.*question"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "`prompt` is list, not text"),
        ({"prompt": " "}, "`prompt` is empty"),
        ({"prompt": "hi", "completions": "x"}, "rename column `completions`"),
        ({"fen": START, "moves": ["e2e4"]}, "1 moves and 0 evals"),
        ({"fen": START, "moves": ["e2e4"], "evals": [float("nan")]}, "not all finite"),
        ({"fen": START, "action": "e2e4", "history": ["d2d4"]}, "ends with the action"),
        ({"fen": "castle"}, "expected 8 rows"),
        ([1], "not a JSON object"),
    ],
)
def test_a_bad_record_says_why(tmp_path: Path, record: Any, reason: str) -> None:
    path = write(tmp_path / "mine.jsonl", [json.dumps(record)])
    with pytest.raises(ValueError, match=rf"1 of 1 rows.*mine.jsonl:1: .*{reason}"):
        load_prompts(path, seed=0)


def test_broken_json_is_a_bad_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ['{"prompt": "a"', '{"prompt": "b"}'])
    with pytest.raises(ValueError, match=r"1 of 2 rows \(50.0%\).*mine.jsonl:1: .*--max-bad-share 0.5"):
        load_prompts(path, seed=0)
    assert only(load_prompts(path, seed=0, max_bad_share=0.5, heldout_share=0)).id == "mine.jsonl:2"


def test_prompts_of_ones_own_and_positions_do_not_mix(tmp_path: Path) -> None:
    path = write_records(tmp_path / "both.jsonl", [{"prompt": "a"}, {"fen": START}])
    with pytest.raises(ValueError, match=r"mixes a `prompt` column with positions"):
        load_prompts(path, seed=0, heldout_share=0)


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


def test_what_is_not_there_or_not_read_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", [ENVIRONMENT_LINE])
    write(tmp_path / "train.csv", [ENVIRONMENT_LINE])
    write(tmp_path / "empty.txt", [""])
    for spec, reason in {
        f"{tmp_path}/tran.txt": rf"no file {tmp_path}/tran.txt; did you mean {tmp_path}/train.txt",
        f"{tmp_path}/nowhere/train.txt": "there is no folder",
        f"{tmp_path}/train.csv": r"\.txt, \.jsonl, \.parquet, \.fen, \.epd, \.pgn, not from \.csv files",
        f"{tmp_path}": "is a folder: name one file",
        f"{tmp_path}/empty.txt": "no prompts to train on .*give other --prompts",
        "bundle": "no file bundle.*OWNER/NAME on the hub",
    }.items():
        with pytest.raises(ValueError, match=reason):
            load_prompts(spec, seed=0)
    with pytest.raises(ValueError, match="all of them are held out: lower --heldout-share"):
        load_prompts(f"{tmp_path}/train.txt", seed=0, heldout_share=1.0)
    with pytest.raises(ValueError, match="a count is not negative"):
        load_prompts(f"{tmp_path}/train.txt", seed=0, heldout_count=-1)


def test_the_bundle_brings_its_own_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "POSITIONS", tmp_path)
    with pytest.raises(ValueError, match=r"train.txt is missing"):
        load_prompts("bundled", seed=0)
    lines = game_lines(60, 60)
    fens = sorted({line[3:].split("M:")[0].split("+")[0].strip() for line in lines})
    train = [line for line in lines if any(fen in line.split("+")[0] for fen in fens[:40])]
    write(tmp_path / "train.txt", train)
    write(tmp_path / "heldout.txt", [line for line in lines if line not in train])
    source = load_prompts("bundled", seed=0, policy_share=0.5, heldout_count=15)
    assert Counter(p.task for p in source.heldout) == {"policy": 15, "environment": 15}
    assert all(p.id.startswith("heldout.txt:") for p in source.heldout)
    assert sorted(set(ids(source.draw(80)))) == sorted(f"train.txt:{n}" for n in range(1, 81))
    write(tmp_path / "heldout.txt", train[:1])
    with pytest.raises(AssertionError, match="overlap"):
        load_prompts("bundled", seed=0)


def test_the_real_bundle_is_whole() -> None:
    source = load_prompts("bundled", seed=0, policy_share=0.5, max_bad_share=0.0)
    assert Counter(p.task for p in source.heldout) == {"policy": 1000, "environment": 1000}
    assert Counter(p.task for p in source.draw(8)) == {"policy": 4, "environment": 4}


# ------------------------------------------------------------------------------------ the hub


class Hub:
    """`datasets.load_dataset` for rows at hand, counting how many are downloaded."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.asked: list[tuple[str, str]] = []

    def load_dataset(self, name: str, *, split: str, streaming: bool) -> Any:
        datasets: Any = importlib.import_module("datasets")

        assert streaming
        self.asked.append((name, split))
        return datasets.IterableDataset.from_generator(lambda: iter(self.rows))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    datasets = pytest.importorskip("datasets")
    fake = Hub([{"text": line} for line in game_lines(70, 30)])
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    monkeypatch.setattr(hub_module, "BLOCK_ROWS", 16)
    return fake


@pytest.mark.parametrize("block_rows", [7, 25, 50, 100, 1000])
def test_a_stream_deals_each_row_once_an_epoch(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(hub_module, "BLOCK_ROWS", block_rows)
    source = load_prompts("jrahn/rookworld_7m", seed=0, policy_share=1.0, heldout_share=0.2)
    num_train = 70 - sum(p.task == "policy" for p in source.heldout)
    epochs = [ids(source.draw(num_train)) for _ in range(3)]
    assert all(len(set(epoch)) == num_train for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != sorted(epochs[0], key=lambda row: int(row.split(":")[1]))
    assert not set(epochs[0]) & set(ids(source.heldout))
    assert hub.asked == [("jrahn/rookworld_7m", "train")]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 9), st.integers(0, 130), st.integers(1, 130), st.sampled_from([None, 0.0, 0.3, 1.0]))
def test_a_stream_resumes_anywhere(hub: Hub, seed: int, before: int, after: int, share: float | None) -> None:
    source = load_prompts("owner/name", seed=seed, policy_share=share)
    source.draw(before)
    state = json.loads(json.dumps(source.state()))
    expected = source.draw(after)
    resumed = load_prompts("owner/name", seed=seed, policy_share=share)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.draw(after) == expected
    assert resumed.state() == source.state()


def test_a_resumed_stream_skips_what_it_has_seen(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = importlib.import_module("datasets")

    source = load_prompts("owner/name", seed=0, policy_share=1.0)
    source.draw(40)
    state = source.state()
    assert state["lanes"]["policy"]["row"] >= 32
    skipped: list[int] = []
    skip = datasets.IterableDataset.skip

    def noting(data: Any, count: int) -> Any:
        skipped.append(count)
        return skip(data, count)

    monkeypatch.setattr(datasets.IterableDataset, "skip", noting)
    resumed = load_prompts("owner/name", seed=0, policy_share=1.0)
    resumed.restore(state)
    resumed.draw(1)
    assert skipped == [0, state["lanes"]["policy"]["row"]]


def test_a_stream_holds_one_block_in_memory(hub: Hub) -> None:
    source = load_prompts("owner/name", seed=0, policy_share=0.1)
    for _ in range(100):
        source.draw(1)
        assert all(len(lane._block or ()) <= 16 for lane in source._lanes.values())  # type: ignore


def test_heldout_prompts_of_a_stream_come_from_its_first_rows(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(hub_module, "HEAD_ROWS", 50)
    source = load_prompts("owner/name:validation", seed=0, heldout_share=0.3, heldout_count=5)
    assert hub.asked == [("owner/name", "validation")]
    numbers = [int(p.id.removeprefix("owner/name:validation:")) for p in source.heldout]
    assert 5 <= len(numbers) <= 10 and max(numbers) < 50
    everything = load_prompts("owner/name:validation", seed=0, heldout_share=0.3).heldout
    fens = {p.columns["fen"] for p in everything}
    assert not fens & {p.columns["fen"] for p in source.draw(300)}
    assert any("in its first rows" in message for message in logged)


def test_the_head_ends_early_once_enough_is_held_out(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "CHECKED_ROWS", 20)
    read: list[str] = []
    prompts = Intake.prompts

    def counting(intake: Intake, row_id: str, *args: Any, **more: Any) -> list[Prompt]:
        read.append(row_id)
        return prompts(intake, row_id, *args, **more)

    monkeypatch.setattr(Intake, "prompts", counting)
    load_prompts("owner/name", seed=0, heldout_share=0.5, heldout_count=2)
    assert 20 <= len(read) < 40


def test_a_streams_bad_rows_are_judged_after_the_first_thousand(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(hub_module, "CHECKED_ROWS", 50)
    good, bad = hub.rows, [{"text": "bad"}]
    hub.rows = bad + good  # all of the first row, 2% of the first 50
    load_prompts("owner/name", seed=0, max_bad_share=0.02)
    assert sum("1 of 101 rows" in message and "owner/name:0: " in message for message in logged) == 1
    hub.rows = good[:60] + bad + good
    with pytest.raises(ValueError, match=r"1 of 61 rows.*owner/name:60: "):
        load_prompts("owner/name", seed=0)
    hub.rows = bad + good[:9]  # a short one is judged at its end
    with pytest.raises(ValueError, match=r"1 of 10 rows"):
        load_prompts("owner/name", seed=0)
    monkeypatch.setattr(hub_module, "HEAD_ROWS", 60)
    hub.rows = good[:60] + bad * 40  # and while training
    source = load_prompts("owner/name", seed=0, policy_share=1.0)
    with pytest.raises(ValueError, match=r"1 of 61 rows.*--max-bad-share"):
        source.draw(60)


def test_a_stream_of_nothing_useful_is_an_error(hub: Hub) -> None:
    hub.rows = []
    with pytest.raises(ValueError, match=r"no prompts to train on in owner/name: give other"):
        load_prompts("owner/name", seed=0)
    hub.rows = [{"question": "x"}] * 5
    with pytest.raises(ValueError, match=r"none of the columns.*question"):
        load_prompts("owner/name", seed=0)
    hub.rows = [{"text": line} for line in game_lines(0, 9)]
    with pytest.raises(ValueError, match=r"asks for policy prompts alone"):
        load_prompts("owner/name", seed=0, policy_share=1.0)


def test_a_stream_of_ones_own_prompts(hub: Hub) -> None:
    hub.rows = [{"prompt": f"{n} + {n} =", "answer": 2 * n} for n in range(40)]
    drawn = load_prompts("owner/name", seed=0, policy_share=0.5, heldout_share=0).draw(40)
    assert sorted(p.columns["answer"] for p in drawn) == list(range(0, 80, 2))


def test_a_changed_stream_is_not_resumed(hub: Hub) -> None:
    state = load_prompts("owner/name", seed=0).state()
    hub.rows = hub.rows[1:]
    with pytest.raises(ValueError, match="same --prompts"):
        load_prompts("owner/name", seed=0).restore(state)


def test_a_hub_out_of_reach_says_so_and_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot read .*owner/name.*OfflineMode.*FILE.*--prompts bundled"):
        load_prompts("owner/name", seed=0)


def test_a_hub_that_fails_on_the_way_says_so(hub: Hub) -> None:
    kept = hub.rows

    class Failing(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from kept[:20]
            raise ConnectionError("reset by peer")

    hub.rows = Failing()
    with pytest.raises(ValueError, match=r"ConnectionError: reset by peer.*--prompts bundled"):
        load_prompts("owner/name", seed=0)


def test_without_the_package_datasets_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets, or .*--prompts bundled"):
        load_prompts("owner/name", seed=0)
