"""Rewards of groups that have ended are asked for while others are sampled: told by the order of calls."""

import asyncio
import os
import random
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from whole_runs import train

from grpo import phases
from grpo.data.reward_calls import RewardFailed
from grpo.data.reward_functions import RewardFunctions
from grpo.logs.tracking import COMPLETIONS_FILE, METRICS_FILE, read_lines
from grpo.rewards import PolicyReward
from grpo.rollout.arena import Arena
from grpo.types import Batch, Prompt
from rewards.analysis import Analysis

FEN = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The order of tokens and of what rewards do."""
    seen: list[str] = []
    advance = Arena.decode_step

    def noted(arena: Arena) -> None:
        seen.append("token")
        advance(arena)

    monkeypatch.setattr(Arena, "decode_step", noted)
    return seen


def rewarded_by(reward):
    """Has a trainer use this reward alone."""
    return lambda trainer: setattr(trainer.run, "rewards", RewardFunctions([reward]))


def test_a_coroutine_is_asked_about_a_group_while_others_are_sampled(config, calls, monkeypatch):
    """One that takes 50 ms is asked about each completion once, and what it says and logs is the row's."""
    asked, texts = threading.Event(), list[str]()

    async def reward(completions, log_extra, log_metric, **columns):
        calls.append("asked")
        texts.extend(completions)
        asked.set()
        await asyncio.sleep(0.05)
        calls.append("answered")
        log_extra("letters", list(map(len, completions)))
        log_metric("groups", len(completions))
        return [len(text) / 10 for text in completions]

    begin = RewardFunctions.begin

    def begin_and_see(self, batch):
        begin(self, batch)
        assert asked.wait(10)  # though nobody waits for it
        asked.clear()

    monkeypatch.setattr(RewardFunctions, "begin", begin_and_see)
    config = replace(config, steps=1, rollout_rows=4, batch_size=16, logged_completions=16)
    folder = train(config, rewarded_by(reward))
    tokens = [place for place, call in enumerate(calls) if call == "token"]
    assert tokens[0] < calls.index("asked") < tokens[-1]
    assert calls.count("asked") == calls.count("answered") == 4 and len(texts) == 16
    rows = read_lines(folder / COMPLETIONS_FILE)
    assert sorted(row["completion"] for row in rows) == sorted(texts)
    assert all(row["rewards"]["reward"] == pytest.approx(len(row["completion"]) / 10) for row in rows)
    assert all(row["extra"]["letters"] == len(row["completion"]) for row in rows)
    assert read_lines(folder / METRICS_FILE)[0]["groups"] == 4


def test_the_process_is_as_it_was_though_a_coroutine_has_changed_it_meanwhile(config, tmp_path, monkeypatch):
    """Folder, seeds and path are changed while others are sampled, and are what they were afterwards."""
    monkeypatch.chdir(tmp_path)
    changed, state, path = threading.Event(), random.getstate(), list(sys.path)
    begin = RewardFunctions.begin

    async def reward(completions, **columns):
        os.chdir("/")
        sys.path.append("/nowhere")
        random.random()
        changed.set()
        return [0.0] * len(completions)

    def begin_and_see(self, batch):
        begin(self, batch)
        assert changed.wait(10)

    monkeypatch.setattr(RewardFunctions, "begin", begin_and_see)
    train(replace(config, steps=1), rewarded_by(reward))
    assert os.getcwd() == str(tmp_path) and sys.path == path and random.getstate() == state


def test_a_coroutine_that_fails_while_others_are_sampled_ends_the_run_as_any_reward(config):
    async def reward(completions, **columns):
        raise OSError("no such host")

    with pytest.raises(RewardFailed, match="no such host"):
        train(replace(config, steps=1), rewarded_by(reward))


def test_what_was_begun_before_memory_ran_out_is_not_waited_for(config, monkeypatch):
    """Texts are the same again, and so is what is said of them."""
    answers = []

    async def reward(completions, **columns):
        answers.append(len(completions))
        return [float(len(text)) for text in completions]

    begin_rollout, tried = phases.begin_rollout, []

    def runs_out_once(*args, **options):
        sampling = begin_rollout(*args, **options)
        if not tried:  # once the last group has ended
            tried.append(sampling)
            whole = sampling.batch
            sampling.batch = lambda prompts, groups=None: whole(prompts, groups) if groups else fail()
        return sampling

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    plain = train(replace(config, steps=1, name="plain"), rewarded_by(reward))
    monkeypatch.setattr(phases, "begin_rollout", runs_out_once)
    again = train(replace(config, steps=1, name="again"), rewarded_by(reward))
    assert tried and read_lines(again / COMPLETIONS_FILE) == read_lines(plain / COMPLETIONS_FILE)


class Engine:
    """Answers at once, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def submit(self, fen: str, moves: tuple[str, ...] = ()) -> Future[Analysis]:
        self.asked.append(tuple(moves))
        answer: Future[Analysis] = Future()
        answer.set_result(Analysis(tuple(moves) or ("e2e4",), (0.1,) * max(1, len(moves))))
        return answer


def test_the_engine_is_asked_about_moves_of_a_group_before_its_batch_is_scored():
    """Legal ones that are not among the best; scoring then asks nothing new."""
    engine, prompt = Engine(), Prompt("1", f"P: {FEN}", {"task": "policy", "fen": FEN})
    rewards = RewardFunctions([PolicyReward()]).with_engine(engine)
    texts = [
        "    M: e2e4 d2d4 a2a3 a2a4 e7e5    E: 0.1 0.2 0.3 0.4 0.5    B: e2e4",
        "    M: g1f3    E: 0.1    B: g1f3",
    ]
    count = torch.ones(2, dtype=torch.long)
    batch = Batch.of_rows(
        [prompt], [[1]], count[:, None], count, terminated=count > 0, sampler_logp=count[:, None], texts=texts
    )
    rewards.prepare([prompt])
    assert engine.asked == [()]
    rewards.begin(batch)
    asked = set(engine.asked)
    assert asked == {(), ("d2d4",), ("a2a3",), ("a2a4",), ("g1f3",)}
    rewards(batch)
    assert set(engine.asked) == asked
