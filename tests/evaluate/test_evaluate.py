"""Scores of hand-worked completions, intervals of known data, games of stub policies, the command."""

import io
import itertools
import json
import math
import random

import chess
import numpy as np
import pytest
import torch
from benchmarks.positions import random_endgame, transition_lines
from commands import run
from rich.console import Console
from scipy import stats

import grpo.evaluate.games
import grpo.evaluate.heldout
from grpo.commands.evaluate import EvaluateConfig, show
from grpo.config.groups import SamplingSettings
from grpo.data import is_heldout
from grpo.data.beforehand import check_beforehand
from grpo.data.reward_functions import Scores
from grpo.evaluate import (
    Evaluation,
    comparison_table,
    evaluate,
    mate_in_one,
    paired_difference,
    read_mates,
    results_table,
    score_completions,
    self_play,
)
from grpo.evaluate.games import play_games, random_openings
from grpo.evaluate.scores import HALF_MOVES, MATES
from grpo.types import Prompt, Rollout
from rewards.analysis import Analysis
from rewards.environment import referee
from rewards.formats import (
    PolicySample,
    environment_completion,
    environment_prompt,
    policy_completion,
    policy_line,
    policy_prompt,
)

START = chess.STARTING_FEN
FEN = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56"
MOVES = ["d4c4", "a4a5", "a6g6", "a6a8", "d4c5"]
EVALS = [-4.0, 0.3, 0.1, 0.0, 0.2]
GREEDY = SamplingSettings(max_new_tokens=144, temperature=0.0)


def policy(fen=FEN, moves=MOVES, evals=EVALS, row="p:1"):
    return Prompt(row, policy_prompt(fen), {"task": "policy", "fen": fen, "moves": moves, "evals": evals})


def environment(fen=START, action="e2e4", row="e:1"):
    columns = {"task": "environment", "fen": fen, "action": action, "history": [action]}
    return Prompt(row, environment_prompt(fen, action, [action]), columns)


def scored(prompt, completion, **options):
    return {name: row.item() for name, row in score_completions([prompt], [completion], **options).items()}


# ------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize(
    ("completion", "best_move", "top5", "legal", "form"),
    [
        pytest.param(policy_completion(MOVES, EVALS, "a4a5"), 1, 1, 1, 1, id="perfect"),
        pytest.param("M: a4a5 a6g6 d4d5 E: 0.3 0.1 0.0 B: d4c5", 0, 2 / 5, 1, 1, id="second best"),
        pytest.param("M: a4a5 a4a5 a4a5 E: 0 0 0 B: a4a5", 1, 1 / 5, 1, 1, id="one move thrice"),
        pytest.param("M: a4a5 h1h2 E: 0.3 B: h1h2", 0, 1 / 5, 0, 0, id="illegal, an eval short"),
        pytest.param(policy_prompt(FEN), 0, 0, 0, 0, id="copy of the prompt"),
        pytest.param("", 0, 0, 0, 0, id="empty"),
        pytest.param("M: a4a5 E: 0.3 B: 0000", 0, 1 / 5, 0, 0, id="null move"),
    ],
)  # fmt: skip
def test_policy_columns(completion, best_move, top5, legal, form):
    assert scored(policy(), completion) == {
        "policy/best_move": best_move,
        "policy/top5": pytest.approx(top5),
        "policy/legal": legal,
        "policy/format": form,
    }


def test_equal_labels_are_equally_best():
    tied = policy(evals=[0.0, 0.5, 0.5, 0.0, 0.0])
    assert [scored(tied, f"B: {move}")["policy/best_move"] for move in MOVES] == [0, 1, 1, 0, 0]


def test_the_engine_overrules_labels():
    class Engine:
        def analyse(self, fens):
            assert fens == [FEN]
            return [Analysis(("d4c5", "a6g6"), (0.2, 0.1))]

    row = scored(policy(), "M: a4a5 d4c5 E: 0.3 0.2 B: d4c5", engine=Engine())
    assert (row["policy/best_move"], row["policy/top5"]) == (1, 1 / 2)


def test_without_truth_its_columns_are_left_out():
    assert scored(policy(moves=None, evals=None), "M: a4a5 E: 0.3 B: a4a5") == {
        "policy/legal": 1,
        "policy/format": 1,
    }


AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
BEFORE_MATE = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
MATED = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"


@pytest.mark.parametrize(
    ("prompt", "completion", "columns"),
    [
        # next_state, nls, reward, terminated, truncated, format
        pytest.param(environment(), f"{AFTER_E4}+0.001+0+0", (1, 1, 1, 1, 1, 1), id="perfect"),
        # 8 to 4P3 is three edits, P to 1 and w to b one each: five of the longer one's 58 characters.
        pytest.param(environment(), f"{START}+0.001+0+0", (0, 1 - 5 / 58, 1, 1, 1, 1), id="copy"),
        pytest.param(environment(), f"{AFTER_E4}+0.5+1+0", (1, 1, 0, 0, 1, 1), id="drawn, it says"),
        pytest.param(environment(), f"{AFTER_E4}+0.0010+0+0", (1, 1, 1, 1, 1, 1), id="same value"),
        pytest.param(environment(), f"{AFTER_E4}+0.002+0+0", (1, 1, 0, 1, 1, 1), id="near value"),
        pytest.param(environment(), f"{AFTER_E4}+nan+0+0+0", (1, 1, 0, 1, 1, 0), id="five fields, nan"),
        pytest.param(environment(), f"{AFTER_E4}", (1, 1, 0, 0, 0, 0), id="cut"),
        pytest.param(environment(), "", (0, 0, 0, 0, 0, 0), id="empty"),
        pytest.param(environment(action="e2e5"), f"{START}+-1.0+0+1", (1, 1, 1, 1, 1, 1), id="illegal"),
        pytest.param(environment(BEFORE_MATE, "d8h4"), f"{MATED}+1.0+1+0", (1, 1, 1, 1, 1, 1), id="mate"),
    ],
)  # fmt: skip
def test_environment_columns(prompt, completion, columns):
    names = ("next_state", "nls", "reward", "terminated", "truncated", "format")
    expected = {
        f"environment/{name}": pytest.approx(score) for name, score in zip(names, columns, strict=True)
    }
    assert scored(prompt, completion) == expected


def test_tasks_have_their_own_columns():
    prompts = [policy(), Prompt("c:1", "Hello", {}), environment()]
    scores = score_completions(prompts, ["B: a4a5", "Hello", ""])
    np.testing.assert_array_equal(scores["policy/legal"], [1, np.nan, np.nan])
    np.testing.assert_array_equal(scores["environment/format"], [np.nan, np.nan, 0])


# -------------------------------------------------------------------------------------- statistics


def evaluation(values, column="policy/legal", prompt=policy):
    prompts = [prompt(row=str(row)) for row in range(len(values))]
    return Evaluation.of(prompts, {column: np.array(values, float).reshape(len(values), -1)})


def test_prompts_without_a_score_are_left_out():
    nan = math.nan
    some = evaluation([[1, 0], [nan, nan], [nan, 1]])
    np.testing.assert_array_equal(some.scores["policy/legal"], [0.5, 1])
    assert evaluation([nan, nan]).scores == {}
    assert some.as_metrics() == {"eval_policy/legal": 0.75}
    assert some.as_metrics(prefix="") == {"policy/legal": 0.75}


def test_interval_of_binary_scores_is_wilsons():
    # Wilson (1927) at 8 of 10: (8 + z²/2 ± z √(1.6 + z²/4)) / (10 + z²)
    z = stats.norm.ppf(0.975)
    middle, half = (8 + z**2 / 2) / (10 + z**2), z * math.sqrt(1.6 + z**2 / 4) / (10 + z**2)
    assert evaluation([1] * 8 + [0] * 2).interval("policy/legal") == pytest.approx(
        (middle - half, middle + half)
    )
    low, high = evaluation([1] * 50).interval("policy/legal")
    assert (low, high) == pytest.approx((50 / (50 + z**2), 1))  # not zero wide


@pytest.mark.parametrize(("hits", "num"), [(0, 1), (1, 1), (0, 7), (7, 7), (3, 7), (199, 200), (40, 1000)])
def test_the_interval_of_a_share_is_scipys(hits, num):
    theirs = stats.binomtest(hits, num).proportion_ci(0.95, "wilson")
    ours = evaluation([1] * hits + [0] * (num - hits)).interval("policy/legal")
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_interval_of_other_scores_is_a_bootstrap():
    values = np.random.default_rng(0).choice([0.0, 0.25, 0.5, 0.75, 1.0], size=200)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", rng=1).confidence_interval
    assert evaluation(values).interval("policy/legal") == pytest.approx((theirs.low, theirs.high), abs=2e-3)
    assert evaluation([0, 1, 1], HALF_MOVES).interval(HALF_MOVES) == (0, 1)  # counts, not a share
    assert evaluation([0.5, 0.5]).interval("policy/legal") == (0.5, 0.5)
    assert evaluation([0.5]).interval("policy/legal") == (-math.inf, math.inf)


def test_paired_difference_is_scipys_bootstrap():
    rng = np.random.default_rng(0)
    before = rng.random(200)
    after = before + rng.normal(0.02, 0.1, 200)
    mean, low, high = paired_difference(evaluation(before), evaluation(after), "policy/legal")
    theirs = stats.bootstrap((after - before,), np.mean, method="percentile", rng=1).confidence_interval
    assert mean == pytest.approx((after - before).mean())
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=1e-3)


def test_paired_difference_of_known_data():
    # 20 of 100 become right and 5 wrong: 0.15, variance of one 0.25 - 0.15² = 0.2275
    before, after = evaluation([0] * 60 + [1] * 40), evaluation([1] * 20 + [0] * 45 + [1] * 35)
    mean, low, high = paired_difference(before, after, "policy/legal")
    assert mean == pytest.approx(0.15)
    assert (low, high) == pytest.approx((0.15 - 0.0935, 0.15 + 0.0935), abs=0.01)
    assert paired_difference(before, after, "policy/legal") == (mean, low, high)
    assert paired_difference(after, after, "policy/legal") == (0, 0, 0)


def test_other_prompts_are_not_paired():
    before, after = evaluation([0, 1]), evaluation([0, 1], prompt=environment)
    with pytest.raises(ValueError, match="evaluate both on the same"):
        paired_difference(before, after, "policy/legal")
    with pytest.raises(ValueError, match="no column 'reward'"):
        paired_difference(before, before, "reward")


def test_saved_and_loaded_is_the_same(tmp_path):
    before = evaluation([1 / 3, 0.1, 1]) | evaluation([0.7], "reward")
    before.save(tmp_path / "before.json")
    after = Evaluation.load(tmp_path / "before.json")
    for column in ("policy/legal", "reward"):
        np.testing.assert_array_equal(after.scores[column], before.scores[column])
        assert paired_difference(before, after, column) == (0, 0, 0)


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', '{"a": {"scores": ["x"], "prompts": ""}}', None])
def test_other_files_are_no_evaluations(tmp_path, content):
    file = tmp_path / "other.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json is no saved evaluation .*--json"):
        Evaluation.load(file)


def printed(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return " ".join(console.file.getvalue().split())


def test_tables():
    before, after = evaluation([0] * 60 + [1] * 40), evaluation([1] * 20 + [0] * 45 + [1] * 35)
    before |= evaluation([0.5, 0.7], "reward")
    after |= evaluation([0.25, 0.5], "reward")
    assert "policy/legal │ 40.0 (30.9 to 49.8) │ 100" in printed(results_table({"greedy": before}))
    comparison = printed(comparison_table(before, after))
    assert "40.0 (30.9 to 49.8) │ 55.0 (45.2 to 64.4) │ +15.0 (+" in comparison
    assert "-0.225 (-0.250 to -0.200)" in comparison
    assert "before" in comparison


# -------------------------------------------------------------------------------------- generation


def answered(answer, monkeypatch, module):
    """Make `answer(prompt)` the model of a module. Returns the prompts and uniforms it is asked with."""
    asked = []

    def rollout(model, tokenizer, prompts, uniforms, settings, *, rows, watch_rows=None):
        assert uniforms.shape[1] == settings.max_new_tokens
        asked.append((list(prompts), uniforms))
        completions = [answer(prompt) for prompt in prompts for _ in range(len(uniforms) // len(prompts))]
        lengths = torch.ones(len(uniforms), dtype=torch.long)
        return Rollout(
            list(prompts), [], lengths[:, None], lengths, lengths > 0, lengths[:, None], completions
        )

    monkeypatch.setattr(module, "rollout", rollout)
    return asked


def right(prompt):
    if prompt.task == "policy":
        return policy_completion(MOVES, EVALS, "a4a5")
    return environment_completion(*referee(prompt.columns["fen"], prompt.columns["action"]))


MIXED = [environment(), policy(row="p:1"), environment(FEN, "a4a5", row="e:2"), policy(row="p:2")]


def test_scores_are_in_the_prompts_order(monkeypatch):
    def answer(prompt):
        return "" if prompt.id in ("p:1", "e:2") else right(prompt)

    asked = answered(answer, monkeypatch, grpo.evaluate.heldout)
    result = evaluate(None, None, MIXED, settings=GREEDY, rows=2, seed=0, samples=4)
    assert result.scores["policy/best_move"].tolist() == [0, 1]
    assert result.scores["environment/next_state"].tolist() == [1, 0]
    ((prompts, uniforms),) = asked
    assert [prompt.id for prompt in prompts] == ["p:1", "p:2", "e:1", "e:2"]  # by task, longest first
    assert len(uniforms) == 4  # greedy: a single sample


def test_samples_are_averaged_and_uniforms_stay_with_their_prompt(monkeypatch):
    calls = itertools.count()
    asked = answered(lambda p: "" if next(calls) % 4 == 3 else right(p), monkeypatch, grpo.evaluate.heldout)
    settings = SamplingSettings(max_new_tokens=3)
    result = evaluate(None, None, MIXED, settings=settings, rows=2, seed=0, samples=4)
    assert result.mean("policy/legal") == result.mean("environment/next_state") == 0.75
    evaluate(None, None, [MIXED[0], MIXED[2]], settings=settings, rows=2, seed=0, samples=4)
    (_, uniforms), (_, fewer) = asked
    assert torch.equal(uniforms[8:12], fewer[:4])  # of e:1, first in both
    assert not torch.equal(uniforms[12:], fewer[4:])  # of e:2, third and second


def test_rewards_are_columns(monkeypatch):
    """Their sum, and each by TRL's name; a prompt that none scores has none."""

    def judge(rollout):
        numbers = {"c:1": math.nan, "c:2": 2.0, "c:3": 3.0}
        table = torch.tensor([[numbers[prompt.id], math.nan] for prompt in rollout.row_prompts])
        return Scores(("size", "other"), table.double(), torch.tensor([2.0, 1.0]).double(), [], [], {})

    answered(lambda prompt: prompt.text, monkeypatch, grpo.evaluate.heldout)
    prompts = [Prompt(f"c:{length}", "x" * length, {}) for length in (1, 2, 3)]
    result = evaluate(None, None, prompts, settings=GREEDY, rows=8, seed=0, judge=judge)
    columns = {name: scores.tolist() for name, scores in result.scores.items()}
    assert columns == {"reward": [4, 6], "rewards/size/mean": [2, 3]}
    assert result.as_metrics() == {"eval_reward": 5, "eval_rewards/size/mean": 2.5}


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ValueError, match="no prompts to evaluate"):
        evaluate(None, None, [], settings=GREEDY, rows=1, seed=0)
    with pytest.raises(ValueError, match="samples is 0"):
        evaluate(None, None, MIXED, settings=GREEDY, rows=1, seed=0, samples=0)


def test_rows_at_once_change_nothing(load):
    model, tokenizer, _ = load("gpt2", "fp64")
    settings = SamplingSettings(max_new_tokens=8)
    one, many = (
        evaluate(model, tokenizer, MIXED, settings=settings, rows=rows, seed=0, samples=3) for rows in (1, 64)
    )
    assert one.as_metrics() == many.as_metrics()
    assert 0 < one.mean("environment/nls") < 1


# ------------------------------------------------------------------------------------------- games


def first_legal(fen):
    return min(move.uci() for move in chess.Board(fen).legal_moves)


def test_games_end_at_the_first_illegal_move():
    asked = []

    def choose(games):
        asked.append(list(games))
        return ["e2e5" if game == 1 and len(asked) == 3 else first_legal(fen) for game, fen in games.items()]

    assert play_games([chess.Board(), chess.Board(), chess.Board()], choose, max_plies=5) == [5, 2, 5]
    assert asked == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 2], [0, 2]]


def test_games_end_when_they_are_over():
    fools_mate = iter(["f2f3", "e7e5", "g2g4", "d8h4"])
    assert play_games([chess.Board()], lambda games: [next(fools_mate)], max_plies=9) == [4]
    assert play_games([chess.Board(MATED)], lambda games: ["e1f2"], max_plies=9) == [0]


def test_openings_are_seeded():
    fens = [board.fen() for board in random_openings(20, seed=1)]
    assert fens == [board.fen() for board in random_openings(20, seed=1)]
    assert fens != [board.fen() for board in random_openings(20, seed=2)]
    assert len(set(fens)) == 20


def test_self_play_plays_what_the_model_writes(monkeypatch):
    def answer(prompt):  # legal for White, illegal for Black
        return f"B: {first_legal(prompt.text[3:])}" if " w " in prompt.text else "B: a1a8"

    asked = answered(answer, monkeypatch, grpo.evaluate.games)
    result = self_play(None, None, 5, settings=GREEDY, rows=4, seed=0)
    assert result.scores[HALF_MOVES].tolist() == [1] * 5
    assert len({prompt.text for prompt in asked[0][0]}) == 5
    fens = [FEN, START, BEFORE_MATE]
    result = self_play(None, None, 3, settings=GREEDY, rows=4, seed=0, fens=fens)
    assert sorted(result.scores[HALF_MOVES]) == [0, 1, 1]
    with pytest.raises(ValueError, match="give at most 3 games"):
        self_play(None, None, 4, settings=GREEDY, rows=4, seed=0, fens=fens)


SCHOLARS, FOOLS = "1. e4 e5 2. Qh5 Nc6 3. Bc4 Nf6 4.", "1. f3 e5 2. g4"


def mates_file(folder, *games):
    file = folder / "task.json"
    file.write_text(json.dumps({"name": "checkmate_in_one", "examples": [{"input": g} for g in games]}))
    return file


def test_castling_counts_however_it_is_written():
    fen = "6k1/8/8/8/8/8/8/4K2R w K - 0 1"
    assert play_games([chess.Board(fen)], lambda games: ["e1h1"], max_plies=1) == [1]
    prompt = Prompt("a", f"P: {fen}", {"task": "policy", "fen": fen, "moves": ["e1h1"], "evals": [0.5]})
    scores = score_completions([prompt] * 2, [f"M: {move} E: 0.5 B: {move}" for move in ("e1h1", "e1g1")])
    for column in ("best_move", "top5", "legal"):
        assert scores[f"policy/{column}"].tolist() == [1, 1]


def test_mate_in_one(monkeypatch, tmp_path):
    boards = read_mates(mates_file(tmp_path, SCHOLARS, FOOLS))
    answered(lambda prompt: "M: h5f7 E: 1000 B: h5f7", monkeypatch, grpo.evaluate.games)
    assert mate_in_one(None, None, boards, settings=GREEDY, rows=4, seed=0).scores[MATES].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not BIG-bench's checkmate_in_one"),
        ("[]", "is not BIG-bench's checkmate_in_one"),
        ('{"examples": []}', "no examples"),
        ('{"examples": [{"target": "Qxf7#"}]}', "KeyError: 'input'"),
        ('{"examples": [{"input": 3}]}', "example 1"),
        (json.dumps({"examples": [{"input": SCHOLARS}, {"input": "1. e4 e4"}]}), "example 2 .*illegal san"),
        (json.dumps({"examples": [{"input": "1. e4 e5"}]}), r"example 1 .*\(no move mates\)"),
        (None, "FileNotFoundError"),
    ],
)
def test_bad_mates_files(tmp_path, content, message):
    file = tmp_path / "task.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=f"(?s){message}.*https://"):
        read_mates(file)


# ----------------------------------------------------------------------------------------- command


def lines():
    """Five held-out policy lines with made-up evals, five held-out environment lines, one to train on."""
    rng, num_policy = random.Random(0), 0
    while num_policy < 5:
        board = random_endgame(rng)
        if is_heldout(board.fen()):
            num_policy += 1
            moves = tuple(move.uci() for move in board.legal_moves)[:5]
            yield policy_line(
                PolicySample(board.fen(), moves, tuple(map(float, range(len(moves)))), moves[-1])
            )
    yield from transition_lines(5, seed=0, heldout=True)
    yield from transition_lines(1, seed=0, heldout=False)


def test_command(model_folders, tmp_path):
    prompts, scores = tmp_path / "lines.txt", tmp_path / "scores.json"
    prompts.write_text("\n".join(lines()))
    arguments = [
        model_folders["gpt2"], "--prompts", prompts, "--limit", 3, "--max-new-tokens", 16,
        "--temperature", 1, "--samples", 2, "--self-play", 2, "--self-play-from", "prompts",
        "--mate-in-one", mates_file(tmp_path, SCHOLARS, FOOLS), "--json", scores,
    ]  # fmt: skip
    done = run("scripts/evaluate.py", *arguments, cwd=tmp_path, COLUMNS="160")
    assert done.returncode == 0, done.stderr
    numbers = {name: len(row) for name, row in Evaluation.load(scores).scores.items()}
    policy_columns = ("best_move", "top5", "legal", "format")
    environment_columns = ("next_state", "nls", "reward", "terminated", "truncated", "format")
    assert numbers == {
        **{f"policy/{name}": 3 for name in policy_columns},
        **{f"environment/{name}": 3 for name in environment_columns},
        HALF_MOVES: 2,
        MATES: 2,
    }
    assert "│ mate_in_one" in done.stdout
    assert "0.0 to 65.8" in done.stdout  # Wilson's, of none of two


def test_command_finds_what_is_wrong_before_it_loads_a_model(tmp_path):
    with pytest.raises(ValueError, match="--samples is 0: give at least 1"):
        EvaluateConfig(("nowhere",), samples=0)
    with pytest.raises(ValueError, match=r"--heldout-share is 1\.1: give a share between"):
        EvaluateConfig(("nowhere",), heldout_share=1.1)
    with pytest.raises(ValueError, match="--max-bad-share is nan"):
        EvaluateConfig(("nowhere",), max_bad_share=math.nan)
    with pytest.raises(ValueError, match="there is no folder"):
        EvaluateConfig(("nowhere",), json=tmp_path / "no" / "scores.json")
    for wrong in ({"mate_in_one": tmp_path / "none.json"}, {"before": tmp_path / "none.json"}):
        with pytest.raises(ValueError, match=r"none\.json is no"):
            show(EvaluateConfig(("nowhere",), **wrong))
    with pytest.raises(ValueError, match=r"no file nothing\.txt"):
        check_beforehand(EvaluateConfig(("nowhere",), prompts="nothing.txt").task)
    with pytest.raises(ValueError, match=r"leaves 12 beside --max-new-tokens 500: lower"):
        show(EvaluateConfig(("rook-tiny",), max_new_tokens=500))
