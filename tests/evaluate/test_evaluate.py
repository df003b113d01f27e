"""Scores of hand-worked completions, intervals of known data, before and after."""

import io
import itertools
import json
import math
from unittest import mock

import chess
import numpy as np
import pytest
import torch
from commands import here
from prompt_lines import environment_completion, policy_completion
from rich.console import Console

from grpo.config.groups import SamplingSettings
from grpo.data.reward_functions import Scores
from grpo.evaluate import Evaluation, heldout, paired_difference, quality
from grpo.evaluate.boards import example_boards
from grpo.evaluate.heldout import evaluate
from grpo.evaluate.quality import Example
from grpo.evaluate.scores import HALF_MOVES, MATES, score_completions
from grpo.evaluate.tables import change_table, results_table
from grpo.statistics import mean_interval
from grpo.types import Batch, Prompt
from rewards.analysis import Analysis
from rewards.environment import referee
from rewards.formats import environment_prompt, policy_prompt

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


def printed(what, width=200):
    console = Console(file=io.StringIO(), width=width, markup=False)
    console.print(what)
    return " ".join(console.file.getvalue().split())


AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
BEFORE_MATE = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
MATED = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"
COLUMNS = {
    "policy": ("best_move", "top5", "legal", "format"),
    "environment": ("next_state", "nls", "reward", "terminated", "truncated", "format"),
}


@pytest.mark.parametrize(
    ("prompt", "completion", "columns"),
    [
        (policy(), policy_completion(MOVES, EVALS, "a4a5"), (1, 1, 1, 1)),
        (policy(), "M: a4a5 a6g6 d4d5 E: 0.3 0.1 0.0 B: d4c5", (0, 2 / 5, 1, 1)),
        (policy(), "M: a4a5 a4a5 a4a5 E: 0 0 0 B: a4a5", (1, 1 / 5, 1, 1)),
        (policy(), "M: a4a5 h1h2 E: 0.3 B: h1h2", (0, 1 / 5, 0, 0)),  # illegal, an eval short
        (policy(), policy_prompt(FEN), (0, 0, 0, 0)),
        (policy(), "M: a4a5 E: 0.3 B: 0000", (0, 1 / 5, 0, 0)),
        (environment(), f"{AFTER_E4}+0.001+0+0", (1, 1, 1, 1, 1, 1)),
        # 8 to 4P3 is three edits, P to 1 and w to b one each: five of the longer one's 58 characters.
        (environment(), f"{START}+0.001+0+0", (0, 1 - 5 / 58, 1, 1, 1, 1)),
        (environment(), f"{AFTER_E4}+0.002+1+0", (1, 1, 0, 0, 1, 1)),
        (environment(), f"{AFTER_E4}+nan+0+0+0", (1, 1, 0, 1, 1, 0)),
        (environment(), f"{AFTER_E4}", (1, 1, 0, 0, 0, 0)),
        (environment(), "", (0, 0, 0, 0, 0, 0)),
        (environment(action="e2e5"), f"{START}+-1.0+0+1", (1, 1, 1, 1, 1, 1)),  # illegal
        (environment(BEFORE_MATE, "d8h4"), f"{MATED}+1.0+1+0", (1, 1, 1, 1, 1, 1)),
    ],
)
def test_columns(prompt, completion, columns):
    named = zip(COLUMNS[prompt.task], columns, strict=True)
    assert scored(prompt, completion) == {f"{prompt.task}/{name}": pytest.approx(x) for name, x in named}


def test_the_best_moves_are_the_engines_else_those_of_labels_and_castling_counts_however_it_is_written():
    engine = mock.Mock(analyse=mock.Mock(return_value=[Analysis(("d4c5", "a6g6"), (0.2, 0.1))]))
    tied = policy(evals=[0.0, 0.5, 0.5, 0.0, 0.0])
    assert [scored(tied, f"B: {move}")["policy/best_move"] for move in MOVES] == [0, 1, 1, 0, 0]
    row = scored(policy(), "M: a4a5 d4c5 E: 0.3 0.2 B: d4c5", engine=engine)
    assert (row["policy/best_move"], row["policy/top5"]) == (1, 1 / 2)
    engine.analyse.assert_called_once_with([FEN])
    unranked = scored(policy(moves=None, evals=None), "M: a4a5 E: 0.3 B: a4a5")
    assert unranked == {"policy/legal": 1, "policy/format": 1}  # each task has its own
    prompts = [policy(), Prompt("c:1", "Hello", {}), environment()]
    scores = score_completions(prompts, ["B: a4a5", "Hello", ""])
    np.testing.assert_array_equal(scores["policy/legal"], [1, np.nan, np.nan])
    np.testing.assert_array_equal(scores["environment/format"], [np.nan, np.nan, 0])
    fen = "6k1/8/8/8/8/8/8/4K2R w K - 0 1"
    for move in ("e1h1", "e1g1"):
        row = scored(policy(fen, ["e1h1"], [0.5]), f"M: {move} E: 0.5 B: {move}")
        assert [row[f"policy/{column}"] for column in ("best_move", "top5", "legal")] == [1, 1, 1]


def evaluation(values, column="policy/legal", prompt=policy):
    prompts = [prompt(row=str(row)) for row in range(len(values))]
    return Evaluation.of(prompts, {column: np.array(values, float).reshape(len(values), -1)})


def test_intervals_of_columns_are_those_of_what_is_in_them():
    rates, means = [1.0] * 8 + [0.0] * 2, [0.25, 0.5, 1.0, 0.0, 0.75]
    wilson, bootstrap = mean_interval(rates, bounds=(0.0, 1.0)), mean_interval(means)
    for column in ("policy/legal", "rewards/legal", "reward"):  # a reward may be a share, too
        assert evaluation(rates, column).interval(column) == wilson
        assert evaluation(means, column).interval(column) == bootstrap
    assert evaluation([0] * 200).interval("policy/legal") == pytest.approx((0, 0.0188), abs=1e-4)
    assert evaluation([0, 1, 1], HALF_MOVES).interval(HALF_MOVES) == mean_interval([0, 1, 1])  # counts
    assert evaluation([0.7], "reward").interval("reward") == (-math.inf, math.inf)
    ends = {"eval_policy/legal/low": wilson[0], "eval_policy/legal/high": wilson[1]}
    assert evaluation(rates).interval_metrics() == pytest.approx(ends)


BEFORE, AFTER = evaluation([0] * 60 + [1] * 40), evaluation([1] * 20 + [0] * 45 + [1] * 35)
"""20 of 100 become right and 5 wrong: 0.15, variance of one 0.25 - 0.15² = 0.2275."""


def test_paired_difference_of_known_data_and_what_is_saved_loaded_and_shown_in_tables(tmp_path):
    mean, low, high = paired_difference(BEFORE, AFTER, "policy/legal")
    assert mean == pytest.approx(0.15)
    assert (low, high) == pytest.approx((0.15 - 0.0935, 0.15 + 0.0935), abs=0.01)
    assert paired_difference(BEFORE, AFTER, "policy/legal") == (mean, low, high)
    same, least, most = paired_difference(AFTER, AFTER, "policy/legal")
    assert same == 0 and -0.05 < least < 0 < most < 0.05  # so few prompts may hide a difference
    nan = math.nan
    some = evaluation([[1, 0], [nan, nan], [nan, 1]])
    np.testing.assert_array_equal(some.scores["policy/legal"], [0.5, 1])
    assert some.as_metrics() == {"eval_policy/legal": 0.75} and evaluation([nan, nan]).scores == {}
    before = BEFORE | evaluation([1 / 3, 0.7 + 1 / 6], "reward")
    after = AFTER | evaluation([1 / 3 - 0.25, 0.7 + 1 / 6 - 0.2], "reward")
    before.save(tmp_path / "before.json")
    again = Evaluation.load(tmp_path / "before.json")
    for column in ("policy/legal", "reward"):
        np.testing.assert_array_equal(again.scores[column], before.scores[column])
        assert paired_difference(before, again, column)[0] == 0
    assert "policy/legal │ 40.0 (30.9 to 49.8) │ 100" in printed(results_table({"greedy": before}))
    models = {"before": before, "after": after, "fewer": evaluation([0] * 9)}
    comparison = printed(results_table(models, compared=True))
    assert "40.0 (30.9 to 49.8) │ 55.0 (45.2 to 64.4) │ +15.0 (+" in comparison
    assert "-0.225 (-0.250 to -0.200) │ │ │ 2" in comparison and "other prompts │ 100 9" in comparison


def answered(answer, monkeypatch):
    """Make `answer(prompt)` the model. Returns the prompts and uniforms it is asked with."""
    asked = []

    def begin_rollout(model, tokenizer, prompts, uniforms, settings, *, rows, reusable=None):
        assert uniforms.shape[1] == settings.max_new_tokens
        asked.append((list(prompts), uniforms))
        texts = [answer(prompt) for prompt in prompts for _ in range(len(uniforms) // len(prompts))]
        lengths = torch.ones(len(uniforms), dtype=torch.long)
        batch = Batch.of_rows(
            prompts,
            [],
            lengths[:, None],
            lengths,
            terminated=lengths > 0,
            sampler_logp=lengths[:, None],
            texts=texts,
        )
        sampling = mock.MagicMock(share_done=1.0)
        sampling.batch.side_effect = lambda prompts: batch
        return sampling

    monkeypatch.setattr(heldout, "begin_rollout", begin_rollout)
    return asked


def right(prompt):
    if prompt.task == "policy":
        return policy_completion(MOVES, EVALS, "a4a5")
    return environment_completion(*referee(prompt.columns["fen"], prompt.columns["action"]))


MIXED = [environment(), policy(row="p:1"), environment(FEN, "a4a5", row="e:2"), policy(row="p:2")]


def test_scores_and_uniforms_stay_with_their_prompts_and_samples_are_averaged(monkeypatch):
    asked = answered(lambda p: "" if p.id in ("p:1", "e:2") else right(p), monkeypatch)
    result = evaluate(None, None, MIXED, settings=GREEDY, rows=2, seed=0, samples=4)
    assert result.scores["policy/best_move"].tolist() == [0, 1]
    assert result.scores["environment/next_state"].tolist() == [1, 0]
    ((prompts, uniforms),) = asked
    assert [prompt.id for prompt in prompts] == ["p:1", "p:2", "e:1", "e:2"]  # by task, longest first
    assert len(uniforms) == 4  # greedy: a single sample

    calls = itertools.count()
    asked = answered(lambda p: "" if next(calls) % 4 == 3 else right(p), monkeypatch)
    options = {"settings": SamplingSettings(max_new_tokens=3), "rows": 2, "seed": 0, "samples": 4}
    result = evaluate(None, None, MIXED, **options)
    assert result.mean("policy/legal") == result.mean("environment/next_state") == 0.75
    evaluate(None, None, [MIXED[0], MIXED[2]], **options)
    (_, uniforms), (_, fewer) = asked
    assert torch.equal(uniforms[8:12], fewer[:4])  # of e:1, first in both
    assert not torch.equal(uniforms[12:], fewer[4:])  # of e:2, third and second


def test_rewards_are_columns(monkeypatch):
    """Their sum, and each by TRL's name; a prompt that none scores has none."""
    table = torch.tensor([[3.0, math.nan], [2.0, math.nan], [math.nan, math.nan]]).double()
    judged = Scores(
        ("size", "other"), table, torch.tensor([2.0, 1.0]).double(), [], [], {}, *[torch.ones(3)] * 3
    )
    answered(lambda prompt: prompt.text, monkeypatch)
    prompts = [Prompt(f"c:{length}", "x" * length, {}) for length in (1, 2, 3)]  # judged from the longest on
    result = evaluate(None, None, prompts, settings=GREEDY, rows=8, seed=0, judge=lambda rollout: judged)
    found = {name: scores.tolist() for name, scores in result.scores.items()}
    assert found == {"reward": [4, 6], "rewards/size/mean": [2, 3]}
    assert result.as_metrics() == {"eval_reward": 5, "eval_rewards/size/mean": 2.5}


def test_rows_at_once_change_nothing(load):
    model, tokenizer, _ = load("gpt2", "fp64")
    options = {"settings": SamplingSettings(max_new_tokens=8), "seed": 0, "samples": 3}
    one, many = (evaluate(model, tokenizer, MIXED, rows=rows, **options) for rows in (1, 64))
    assert one.as_metrics() == many.as_metrics()
    assert 0 < one.mean("environment/nls") < 1


def test_the_command_prints_and_saves_all_columns(model_folders, data_file, tmp_path, monkeypatch):
    games = ("1. e4 e5 2. Qh5 Nc6 3. Bc4 Nf6 4.", "1. f3 e5 2. g4")
    (mates := tmp_path / "task.json").write_text(
        json.dumps({"examples": [{"input": each} for each in games]})
    )
    words = [
        model_folders["gpt2"],
        "--prompts",
        data_file,
        "--heldout-share",
        1,
        "--limit",
        3,
        "--max-new-tokens",
        16,
        "--temperature",
        1,
        "--samples",
        2,
        "--self-play",
        2,
        "--self-play-from",
        "prompts",
        "--mate-in-one",
        mates,
        "--json",
        tmp_path / "scores.json",
    ]
    monkeypatch.setenv("COLUMNS", "160")
    done = here("evaluate", *words)
    assert done.returncode == 0, done.stderr
    numbers = {name: len(row) for name, row in Evaluation.load(tmp_path / "scores.json").scores.items()}
    columns = [f"{task}/{name}" for task, names in COLUMNS.items() for name in names]
    assert numbers == dict.fromkeys(columns, 3) | {HALF_MOVES: 2, MATES: 2}
    assert "│ mate_in_one" in done.stdout and "0.0 to 65.8" in done.stdout  # Wilson's, of none of two


def columns(**scores: list[float]) -> Evaluation:
    named = {name.replace("__", "/"): np.array(values, float) for name, values in scores.items()}
    return Evaluation(named, dict.fromkeys(named, "the same"))


def test_changes_are_paired_and_in_percent_said_in_words_and_in_a_table_and_saved(tmp_path):
    """Legal moves rise by 25 of 100, the next state falls, the reward stays; greedy nothing moves."""
    half, whole, rising = [0.5] * 100, [1.0] * 100, [0.5] * 50 + [1.0] * 50
    still = columns(reward=half, policy__legal=whole)
    before = columns(reward=half, policy__legal=half, environment__next_state=whole)
    after = columns(reward=half, policy__legal=rising, environment__next_state=half)
    before, after = ({"sampled": sampled, "greedy": still} for sampled in (before, after))
    found = quality.changes(before, after)
    named = {(each.mode, each.name): each for each in found}
    legal = named["sampled", "a legal move"]
    assert (legal.before, legal.after, legal.change, legal.verdict) == (50, 75, 25, "better")
    assert 15 < legal.low < 25 < legal.high < 35
    assert named["sampled", "the next state, exactly"].verdict == "worse"
    assert named["greedy", "reward"].verdict == "open"
    assert quality.Change("greedy", "x", 1.0, 2.0, 1.0, -0.5, 2.5).verdict == "open"
    assert ("greedy", "the next state, exactly") not in named
    sampled, greedy = quality.in_words(found)
    for words in ("better: a legal move (+25.0)", "worse: the next", "too close to tell: reward (+0.0)"):
        assert words in sampled
    assert "worse: nothing" in greedy and "better" not in greedy
    text = printed(change_table(found, num_prompts=200), width=80)
    assert "[" not in text and all(words in text for words in ("a legal move", "+25.0", "200 prompts"))

    assert quality.load(tmp_path) == ([], [])
    given = [Example("P: x", "one", "two")]
    quality.save(tmp_path, before, after, given)
    assert quality.load(tmp_path) == (found, given)
    for name, content in (("after-greedy.json", "{"), ("examples.json", '[{"prompt": 1}]')):
        (tmp_path / "before-after" / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            quality.load(tmp_path)


def test_examples_are_the_first_that_differ_of_either_task():
    tasks = ["policy"] * 4 + ["environment"] * 4
    prompts = [Prompt(str(i), f"{task[0].upper()}: {i}", {"task": task}) for i, task in enumerate(tasks)]
    before, after = list("abcdefgh"), list("abXdeXXX")  # 2, 5, 6 and 7 differ
    chosen = quality.examples(prompts, before, after)
    assert [(each.prompt, each.before, each.after) for each in chosen] == [
        ("P: 2", "c", "X"),
        ("E: 5", "f", "X"),
        ("E: 6", "g", "X"),
    ]
    assert quality.examples(prompts, before, before) == []


KINGS = "8/8/8/3k4/8/3K4/8/7R w - - 0 1"


def test_boards_stand_beside_what_the_model_said():
    """How answers are judged is a report's as well (tests/workbench/test_report.py)."""
    for prompt, before, after, asked, first, then in (
        (
            f"P: {KINGS}",
            " M: h1h5 E: 5.0 B: d3d5",
            " M: h1h5 E: 5.0 B: h1h5",
            "White to move",
            "d3d5, which is illegal",
            "Rh5+",
        ),
        (f"P: {KINGS}", " B: h1h1", "", "White to move", "h1h1, which is illegal", "no move can be read"),
        (
            f"A: {KINGS}+h1h5+h1h5+",
            "8/8/8/3k4/8/3K4/8/7R b - - 1 1+0.001+0+0",
            "8/8/8/3k3R/8/3K4/8/8 b - - 1 1+0.001+0+0",
            "White plays Rh5+",
            "wrong on h1, h5",
            "right",
        ),
        ("Say hello.", "hallo", "hello", "Say hello.", "hallo", "hello"),
    ):
        text = printed(example_boards(Example(prompt, before, after)), width=110)
        assert asked in text and f"before: {first}" in text and f"after: {then}" in text
        assert ("♔" in text or "♚" in text) == (prompt[:3] in ("A: ", "P: "))


def test_a_reward_is_shown_as_a_share_of_the_most_it_can_be():
    """Two prompts of a function of weight 2 and one of weight 1: 5/3 at most, on average."""
    rewards = evaluation([2.0, 1.0, 0.5], "reward")
    of_each = evaluation([1.0, 0.5, math.nan], "rewards/move/mean") | evaluation(
        [math.nan, math.nan, 0.5], "rewards/answer/mean"
    )
    share = quality.reward_as_share(rewards | of_each, {"move": 2.0, "answer": 1.0})
    np.testing.assert_allclose(share.scores["reward"], [6 / 5, 3 / 5, 3 / 10])
    assert share.mean("reward") == pytest.approx(3.5 / 5)
    assert quality.reward_as_share(of_each, {"move": 2.0}).scores.keys() == of_each.scores.keys()
