"""From files, rows and games to prompts: what they become, in which order, on which side of the split.

And what comes with the package: positions, and a model that is as its card says. Rows and files that are
refused stand in config/test_refusals.py.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import chess
import pytest
import torch
from commands import ROOT
from conftest import examples
from hypothesis import example, given
from hypothesis import strategies as st
from prompt_lines import (
    BLACK_LINE,
    ENVIRONMENT_LINE,
    START,
    PolicySample,
    boards,
    game_lines,
    ids,
    policy_line,
    source_of,
    write,
)
from pyarrow import Table, parquet
from safetensors import safe_open

from grpo.config.groups import BUNDLED, PromptSettings, SamplingSettings
from grpo.data import Prompt, collate, load_prompts
from grpo.data import load as load_module
from grpo.data import source as source_module
from grpo.data.files import FORMATS
from grpo.data.maker import RowParser
from grpo.data.source import heldout_fraction, position
from grpo.evaluate import evaluate
from grpo.model.load import load_policy
from grpo.model.names import BUNDLED_FOLDER
from grpo.model.weights import RolloutModel
from rewards.environment import referee
from rewards.formats import environment_prompt, policy_prompt


def drawn(spec: Path | str, count: int, **options: Any) -> dict[str, Prompt]:
    """The first prompts of a file, by the ends of their ids."""
    source = load_prompts(str(spec), seed=0, **{"heldout_share": 0, **options})
    return {prompt.id.partition(":")[2]: prompt for prompt in source.draw(count)}


def test_lines_become_prompts_with_the_columns_rewards_read(tmp_path, logged):
    spec = write(tmp_path / "lines.txt", [BLACK_LINE, "", ENVIRONMENT_LINE, ENVIRONMENT_LINE[3:]])
    found = drawn(spec, 4, policy_share=0.5)
    fen = "8/1p3pk1/p5p1/4p1b1/P1B1P3/1P3P2/2r3PP/3R2K1 b - - 1 30"
    moves, evals = ["g5e3", "g5f4", "c2c3", "b7b6", "g7f6"], [3.1, 1.2, 1.1, 1.0, 0.9]
    labels = {"task": "policy", "fen": fen, "moves": moves, "evals": evals}
    assert found["1"] == Prompt("lines.txt:1", f"P: {fen}", labels)
    columns = {"task": "environment", "fen": START, "action": "e2e4", "history": ["e2e4"]}
    assert found["3"] == Prompt("lines.txt:3", f"A: {START}+e2e4+e2e4+", columns)
    assert found["4"] == Prompt("lines.txt:4", found["3"].text, columns)  # as published: without its A:
    assert sum("1 of 1 labelled policy lines" in message for message in logged) == 1  # B: is the worst move
    spaced = drawn(spec, 2, policy_share=0.5, settings=PromptSettings(trailing_space=True))
    assert spaced["1"].text == f"P: {fen} " and spaced["3"].text == found["3"].text
    records = [{"text": line, "source": "x"} for line in (BLACK_LINE, ENVIRONMENT_LINE)]
    in_a_column = drawn(write(tmp_path / "lines.jsonl", records), 2)
    assert in_a_column["1"].columns == labels | {"source": "x"} and in_a_column["2"].text == found["3"].text


def test_plain_and_padded_lines_are_one_prompt_and_labels_that_tie_are_not_upside_down(tmp_path):
    sample = PolicySample(START, ("e2e4", "d2d4", "a2a3"), (0.3, 0.3, -0.1), "d2d4")
    lines = [policy_line(sample), policy_line(sample, padded=True), policy_prompt(START)]
    found = drawn(write(tmp_path / "l.txt", lines), 3)
    assert {prompt.text for prompt in found.values()} == {policy_prompt(START)}
    moves = ["e2e4", "d2d4", "a2a3"]
    assert {n: prompt.columns["moves"] for n, prompt in found.items()} == {"1": moves, "2": moves, "3": None}
    for best, upside_down in {"d2d4": 0, "a2a3": 1, "h2h3": 1}.items():
        maker = RowParser("data", max_bad_share=0)
        FORMATS[".txt"][1](lines[0].replace("B: d2d4", f"B: {best}"), "id", maker)
        assert (maker.num_labelled, maker.num_upside_down) == (1, upside_down)


PIECES = (BLACK_LINE, ENVIRONMENT_LINE, START, '{"fen": "', '", "moves": ', "bm Nf3;", '"}')
LETTERS = "PA:+ 8/kKqQpP-wb0101e2e4MEB.;\"'{}[]é\n\0"
LINES = st.lists(st.text(LETTERS, max_size=60) | st.sampled_from(PIECES), max_size=4).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "e2e4", "nan", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(["prompt", "text", "fen", "moves", "evals", "action", "history", "task", "tools"])


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".fen", ".parquet"])
@given(LINES, st.floats(0, 1), st.dictionaries(NAMES, VALUES, max_size=3), st.booleans())
@example("", 0, {"evals": [10**400]}, True)
@example("", 0, {"history": ["e2e4", 3], "action": "e2e4"}, True)
@examples(100)
def test_no_line_or_record_however_broken_raises(kind, line, share, record, is_position):
    position = {"fen": START, "moves": ["e2e4"], "evals": [0.1]} if is_position else {}
    maker = RowParser("data", max_bad_share=0)
    for row in [position | record] if kind == ".parquet" else [line, line[: int(share * len(line))]]:
        prompts = maker.make_or_count("data:1", row, FORMATS[kind][1])
        collate(prompts)
        assert all(isinstance(prompt.text, str) for prompt in prompts) and maker.num_rows


def test_a_fen_column_with_labels_or_an_action(tmp_path):
    after = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1"  # as some tools write it
    records = [
        {"fen": START},
        {"fen": START, "moves": "e2e4 d2d4", "evals": [0.3, 0.2]},
        {"fen": after, "action": "e7e5"},
        {"fen": after, "action": "e7e5", "history": ["e2e4", "e7e5"]},
    ]
    found = drawn(write(tmp_path / "p.jsonl", records), 8)
    clean = after.replace(" e3 ", " - ")
    assert found["1"].columns["moves"] is None and found["1"].task == "policy"
    assert [found["2"].columns[name] for name in ("moves", "evals")] == [["e2e4", "d2d4"], [0.3, 0.2]]
    assert found["3"].text == environment_prompt(clean, "e7e5", ["e7e5"])
    assert found["4"].text == environment_prompt(clean, "e7e5", ["e2e4", "e7e5"])
    tables = [
        {**records[1], "moves": ["e2e4", "d2d4"], "action": None},
        {"fen": START, "moves": None, "evals": None, "action": "e2e4"},
    ]
    parquet.write_table(Table.from_pylist(tables), tmp_path / "p.parquet", row_group_size=1)
    one, other = drawn(tmp_path / "p.parquet", 2), drawn(write(tmp_path / "p.jsonl", tables), 2)
    assert set(one) == {"1", "2"}
    assert all((one[n].text, one[n].columns) == (other[n].text, other[n].columns) for n in one)


def test_castling_is_written_by_the_kings_step_whatever_came_in(tmp_path):
    """In labels, actions and what of the history is castling: a rook may go from e8 to h8, too."""
    both = "r3k2r/pppppppp/8/8/8/8/PPPPPPPP/R3K2R w KQkq - 0 1"
    later = "4rr1k/pppppppp/8/8/8/8/PPPPPPPP/1K1R3R w - - 6 4"  # e8h8 the king's, then e1a1, a8e8, c1b1
    rooks = "r3k3/pppppppp/7r/8/8/8/PPPPPPPP/R3K2R w KQq - 6 4"  # a rook from e8 to h8, and on to h6
    cases = (
        (both, "e1h1", "e1g1", "e1g1"),
        (rooks, "e1a1", "e8h8 a1b1 h8h6 e1a1", "e8h8 a1b1 h8h6 e1c1"),
        (later, "b1a1", "e8h8 e1a1 a8e8 c1b1 g8h8 b1a1", "e8g8 e1c1 a8e8 c1b1 g8h8 b1a1"),
    )
    records = [{"fen": fen, "action": action, "history": given.split()} for fen, action, given, _ in cases]
    records += [{"text": f"A: {both}+e1a1+e1a1+"}, {"fen": both, "moves": "e1h1 e1a1", "evals": [0.3, 0.1]}]
    found = drawn(write(tmp_path / "p.jsonl", records), 20)
    for number, (*_, moves) in zip("1234", (*cases, ("e1c1",)), strict=True):
        columns = found[number].columns
        assert (columns["history"], columns["action"]) == (moves.split(), moves.split()[-1])
    assert found["5"].columns["moves"] == ["e1g1", "e1c1"]


def test_prompts_of_ones_own_keep_every_column_and_a_task_that_is_no_chess(tmp_path):
    records = [
        {"prompt": "2 + 2 =", "answer": "4", "task": "sums"},
        {"prompt": "Hi.", "task": ["a"], "fen": None},
    ]
    found = drawn(write(tmp_path / "mine.jsonl", records), 2, policy_share=1.0)
    assert [found[n].text for n in "12"] == ["2 + 2 =", "Hi."] and found["1"].task == "custom"
    assert found["1"].columns == {"task": "sums", "answer": "4", "fen": None}
    assert found["2"].columns == {"task": ["a"], "answer": None, "fen": None}
    assert drawn(write(tmp_path / "f.jsonl", [{"fen": START, "task": "openings"}]), 1)["1"].task == "policy"


@pytest.mark.parametrize("name", ["p.fen", "p.EPD"])
def test_positions_make_a_policy_and_an_environment_prompt_each_whose_move_is_theirs(tmp_path, name):
    mate = "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5Q2/PPPP1PPP/RNB1K1NR w KQkq - bm Qxf7#; id 7;"
    found = drawn(write(tmp_path / name, ["# openings", START, mate]), 4, policy_share=0.5)
    assert set(found) == {f"{n}:{task}" for n in (2, 3) for task in ("policy", "environment")}
    assert found["3:policy"].columns["fen"].endswith("KQkq - 0 1")
    environment = found["2:environment"]
    action = environment.columns["action"]
    assert chess.Board().is_legal(chess.Move.from_uci(action)) and environment.columns["history"] == [action]
    assert environment.text == f"A: {START}+{action}+{action}+"
    fens, moves = [board.fen() for board in boards(30)], []
    for seed, lines in enumerate((fens, fens[::-1])):
        source = load_prompts(write(tmp_path / name, lines), seed=seed, policy_share=0.0, heldout_share=0)
        moves.append({p.columns["fen"]: p.columns["action"] for p in source.draw(30)})
    assert moves[0] == moves[1] and len(set(moves[0].values())) > 10


def test_a_game_gives_positions_and_moves_with_their_real_history(tmp_path, caplog):
    moves = "e4 e5 Nf3 Nc6 Bb5 a6 Ba4 Nf6 O-O Be7 Re1 b5 (12... d6) {a comment} *"
    games = (moves, "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4. Qxf7# 1-0", "1. e4 e5 2. Ke3 *")
    (tmp_path / "games.pgn").write_text("\n\n".join(f'[Event "?"]\n\n{game}' for game in games))
    found = drawn(tmp_path / "games.pgn", 100, policy_share=0.5, max_bad_share=0.5)
    assert not caplog.records  # python-chess would log the third to stderr on its own
    assert not {"2.0:policy", "2.7:policy"} & found.keys()  # the same text as 1.0:policy, and mate
    assert found["1.0:policy"].columns["fen"] == START and "1.12:policy" in found  # after the last move
    last = found["1.11:environment"].columns
    assert last["action"] == "b7b5"
    assert " ".join(last["history"]) == "g1f3 b8c6 f1b5 a7a6 b5a4 g8f6 e1g1 f8e7 f1e1 b7b5"
    assert referee(last["fen"], last["action"]).truncated is False
    assert found["2.6:environment"].columns["history"][-1] == "h5f7"


@examples(30)
@given(st.integers(1, 12), st.integers(0, 99), st.integers(1, 4))
def test_each_row_comes_once_an_epoch_in_an_order_of_seed_and_epoch(count: int, seed: int, epochs: int):
    def order(count: int, seed: int, drawn: int) -> list[str]:
        source = source_of(custom=[f"{n}" for n in range(count)], seed=seed)
        return [prompt.text for prompt in source.draw(drawn)]

    every = order(count, seed, count * epochs)
    for start in range(0, len(every), count):
        assert sorted(every[start : start + count], key=int) == [str(n) for n in range(count)]
    first, again, other = (order(50, each, 100) for each in (seed, seed, seed + 1))
    assert first == again != other and first[:50] != first[50:]
    assert first[:50] != [str(n) for n in range(50)]


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("prompts") / "mixed.txt", game_lines(30, 12))


@examples(40)
@given(
    st.integers(0, 50),
    st.integers(0, 120),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.none() | st.floats(0, 1),
)
def test_a_restored_source_goes_on_as_if_nothing_had_happened(mixed_file, seed, before, after, share):
    source, resumed = (load_prompts(mixed_file, seed=seed, policy_share=share) for _ in range(2))
    source.draw(before)
    state = json.loads(json.dumps(source.state()))
    expected = [source.draw(count) for count in after]
    resumed.draw(3)
    resumed.restore(state)
    assert resumed.state() == state
    assert [resumed.draw(count) for count in after] == expected and resumed.state() == source.state()


def test_a_checkpoint_of_other_rows_or_another_seed_is_refused(mixed_file, tmp_path):
    state = load_prompts(mixed_file, seed=3).state()
    lines = Path(mixed_file).read_text().splitlines()
    fewer = write(tmp_path / "mixed.txt", lines[:-1])
    for spec, seed, said in ((mixed_file, 4, "seed 3, not 4"), (fewer, 3, "same --prompts")):
        with pytest.raises(ValueError, match=said):
            load_prompts(spec, seed=seed).restore(state)
    load_prompts(write(tmp_path / "mixed.txt", lines), seed=3).restore(state)  # the folder does not matter


@examples(40)
@given(st.floats(0, 1), st.integers(1, 80))
def test_the_mix_is_even_at_every_point_and_however_draws_are_cut(mixed_file: str, share: float, count: int):
    """And each task keeps its order, whatever the share."""
    source, other, alone = (load_prompts(mixed_file, seed=0, policy_share=s) for s in (share, share, 1))
    prompts = source.draw(count)
    policies = [prompt for prompt in prompts if prompt.task == "policy"]
    assert policies == alone.draw(len(policies))
    for number in range(1, count + 1):
        tasks = [prompt.task for prompt in prompts[:number]]
        assert abs(tasks.count("policy") - share * number) < 1 + 1e-9
    assert prompts == [prompt for part in (count // 3, 0, count - count // 3) for prompt in other.draw(part)]


def test_without_a_share_tasks_come_as_often_as_in_the_data(mixed_file, tmp_path, logged):
    source = load_prompts(mixed_file, seed=0, heldout_share=0.0)
    assert Counter(p.task for p in source.draw(42)) == {"policy": 30, "environment": 12}
    alone = drawn(write(tmp_path / "lines.txt", game_lines(20, 0)), 20, policy_share=0.25)
    assert source.heldout == [] and {p.task for p in alone.values()} == {"policy"}
    assert sum("plays no part" in message for message in logged) == 1  # a share of one task is moot


def test_collate_gives_every_column_a_value_for_every_prompt(mixed_file):
    prompts = load_prompts(mixed_file, seed=0, policy_share=0.5).draw(4)
    columns = collate(prompts)
    assert list(columns) == ["task", "fen", "moves", "evals", "action", "history"]
    assert columns["task"] == ["environment", "policy"] * 2
    assert [moves is None for moves in columns["moves"]] == [True, False] * 2
    assert [action is None for action in columns["action"]] == [False, True] * 2
    assert list(collate(prompts[:1])) == list(columns) and collate([]) == {}  # also where one task is alone
    own = [Prompt("a", "x", {"b": 1}), Prompt("c", "y", {"d": 2})]
    assert collate(own) == {"b": [1, None], "d": [None, 2]}


def test_the_split_is_a_property_of_the_position_and_not_of_the_counters():
    fens = [board.fen() for board in boards(400)]
    fractions = [heldout_fraction(Prompt("", "", {"fen": fen})) for fen in fens]
    for fen, fraction in zip(fens, fractions, strict=True):
        assert heldout_fraction(Prompt("", "", {"fen": " ".join(fen.split()[:4]) + " 49 99"})) == fraction
    assert 0.3 < sum(fraction < 0.4 for fraction in fractions) / 400 < 0.5
    # printf '<first four fields>' | sha256sum begins with 05bd4852: 0x05bd4852 / 2**32 = 0.02242
    assert 0.02241 < heldout_fraction(Prompt("", "", {"fen": START})) < 0.02243
    for placed, square in {"pppppppp/8/8/4P3": "-", "ppp1pppp/8/8/3pP3": "e3"}.items():  # where it is usable
        fen = f"rnbqkbnr/{placed}/8/PPPP1PPP/RNBQKBNR b KQkq"
        assert position(Prompt("", "", {"fen": f"{fen} e3 0 1"})) == f"{fen} {square}"


@examples(15)
@given(st.integers(0, 10**6), st.floats(0.05, 0.6))
def test_no_position_is_on_both_sides_whichever_task(tmp_path, seed: int, share: float):
    """And which are held out depends on neither seed nor order; of those that are too many, none is drawn."""
    lines = game_lines(20, 20, seed % 50)
    spec, turned = write(tmp_path / "lines.txt", lines), write(tmp_path / "turned.txt", lines[::-1])
    every, few, other = (
        load_prompts(each, seed=seed + n, policy_share=0.5, heldout_share=share, heldout_count=count)
        for n, (each, count) in enumerate([(spec, 100), (spec, 3), (turned, 3)])
    )
    trained = few.draw(100)  # more than an epoch of each task
    assert not {p.columns["fen"] for p in trained} & {p.columns["fen"] for p in every.heldout}
    assert {*ids(trained), *ids(every.heldout)} == {f"lines.txt:{n}" for n in range(1, 41)}
    assert {p.text for p in few.heldout} == {p.text for p in other.heldout} <= {p.text for p in every.heldout}
    held = Counter(p.task for p in every.heldout)
    assert Counter(p.task for p in few.heldout) == {task: min(3, count) for task, count in held.items()}
    numbers = [int(p.id.split(":")[1]) for p in every.heldout]
    assert numbers == sorted(numbers)


def test_prompts_without_a_position_are_split_by_all_of_their_text(tmp_path, monkeypatch):
    records = [{"prompt": f"Write a short poem about {n}"} for n in range(300)]
    source = load_prompts(write(tmp_path / "mine.jsonl", records), seed=0, heldout_share=0.2)
    assert 30 < len(source.heldout) < 90  # the first four words alone would give 0 or 300
    many = [{"prompt": f"{n}"} for n in range(2_000)]  # each hashed once
    monkeypatch.setattr(source_module, "heldout_fraction", hashed := mock.Mock(wraps=heldout_fraction))
    held = load_prompts(many, seed=0, heldout_share=1, heldout_count=3, to_train=False)
    heldout = [held.heldout, held.lowest_heldout(3)][1]
    assert hashed.call_count == len(many)
    lowest = sorted((heldout_fraction(Prompt("", row["prompt"], {})), row["prompt"]) for row in many)[:3]
    assert {prompt.text for prompt in heldout} == {text for _, text in lowest}
    assert not {p.text for p in source.heldout} & {p.text for p in source.draw(300)}


def test_the_bundled_positions_are_whole_and_in_two_files_by_their_hash(tmp_path, monkeypatch):
    source = load_prompts("bundled", seed=0, policy_share=0.5, heldout_share=1.0, max_bad_share=0.0)
    assert Counter(p.task for p in source.heldout) == {"policy": 1000, "environment": 1000}
    assert {p.id.partition(":")[0] for p in source.heldout} == {"heldout.txt"}
    assert {*ids(source.draw(8000))} == {f"train.txt:{n}" for n in range(1, 8001)}
    monkeypatch.setattr(load_module, "POSITIONS", tmp_path)
    with pytest.raises(ValueError, match=r"train.txt is missing: install again"):
        load_prompts("bundled", seed=0)


def test_the_model_is_a_small_folder_of_the_shape_on_its_card():
    card = (BUNDLED_FOLDER / "README.md").read_text()
    shape = re.search(r"GPT-2 of (\d+) layers, (\d+) wide, ([\d.]+) M parameters, stored in bf16", card)
    config = json.loads((BUNDLED_FOLDER / "config.json").read_text())
    assert f"{config['model_type']} {config['n_layer']} {config['n_embd']}" == f"gpt2 {shape[1]} {shape[2]}"
    with safe_open(BUNDLED_FOLDER / "model.safetensors", "pt") as file:
        parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
        assert {part.get_dtype() for part in parts} == {"BF16"}
        assert f"{sum(math.prod(part.get_shape()) for part in parts) / 1e6:.1f}" == shape[3]
    assert sum(path.stat().st_size for path in BUNDLED_FOLDER.iterdir()) < 12e6


def test_it_plays_as_well_as_is_measured():
    """150 prompts of each task are within 3.5 standard errors of the 1,000 in the documentation."""
    table = (ROOT / "docs" / "measurements.md").read_text().partition("| greedy, before |")[2]
    before = dict(re.findall(r"(?m)^\| (\w+/\w+) (?:\|[^|]*){3}\| ([\d.]+) \|", table))
    model, tokenizer, target = load_policy(BUNDLED, torch.device("cpu"))
    result = evaluate(
        RolloutModel(model, target.dtype).model,
        tokenizer,
        load_prompts("bundled", seed=0, heldout_count=150).heldout,
        settings=SamplingSettings(max_new_tokens=96, temperature=0),
        rows=150,
        seed=0,
    )
    for name in (
        "policy/best_move",
        "policy/legal",
        "policy/format",
        "environment/next_state",
        "environment/reward",
        "environment/terminated",
        "environment/truncated",
        "environment/format",
    ):
        share = float(before[name]) / 100
        assert abs(result.mean(name) - share) < 3.5 * math.sqrt(share * (1 - share) / 150), name
