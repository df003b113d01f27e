"""Input from outside that does more than it should: rewards, and files in the place of others.

tests/data/test_rewards_called.py has answers that are none, tests/config/test_refusals.py what is typed.
"""

import random

import numpy as np
import pytest
import torch
from commands import run
from prompt_lines import write_records

from grpo.data.reward_functions import RewardFunctions
from grpo.types import Batch, Prompt


def batch() -> Batch:
    ones = torch.ones(2, 3)
    prompts = [Prompt("1", "Say a", {"tags": ["kept"]}), Prompt("2", "Say b", {"tags": []})]
    return Batch.of_rows(
        prompts,
        [[1], [2]],
        ones.long(),
        ones[:, 0].long(),
        terminated=ones[:, 0].bool(),
        sampler_logp=ones,
        texts=["a", "b"],
    )


def test_a_reward_may_change_what_it_gets_and_switch_gradients_off():
    def interrupted(completions, **columns):
        raise KeyboardInterrupt

    def changing(prompts, completions, completion_ids, tags, **columns):
        tags[0].append("x")
        for given in (tags, prompts, completion_ids[0], completions):
            given.clear()
        torch.set_grad_enabled(False)
        return [1.0, 1.0]

    given = batch()
    for _ in range(2):
        assert RewardFunctions([changing])(given).rewards.tolist() == [1.0, 1.0]
        assert torch.is_grad_enabled()
    assert given.prompts[0].columns == {"tags": ["kept"]} and given.texts == ["a", "b"]
    with pytest.raises(KeyboardInterrupt):
        RewardFunctions([interrupted])(given)  # Ctrl-C inside a reward is one


def test_random_rewards_are_the_same_for_the_same_completions():
    """Whatever the run did before, and without a trace in the generators that it uses."""

    def drawing(prompts, **columns):
        return [random.random() + np.random.rand() + torch.rand(()) for _ in prompts]

    score, results = RewardFunctions([drawing]), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), random.getstate()
        results.append(score(batch()).rewards)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert torch.equal(*results) and results[0][0] != results[0][1]


BREAKS_LATER = """
calls = []
def reward(completions, **columns):
    calls.append(0)
    return [1.0 if len(calls) < 3 else float("nan")] * len(completions)
"""


def test_an_answer_that_breaks_in_a_later_step_says_how_to_go_on(tmp_path, quick_flags):
    (tmp_path / "mine.py").write_text(BREAKS_LATER)
    write_records(tmp_path / "prompts.jsonl", [{"prompt": f"Say {letter}"} for letter in "abcdefgh"])
    own = ["--prompts", "prompts.jsonl", "--heldout-share", 0, "--reward", "mine.py:reward"]
    done = run("train_lean.py", *quick_flags, *own, "--steps", 5, "--name", "a", "--trackers", cwd=tmp_path)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Traceback" not in said
    assert "the last checkpoint is good; go on with: python train_lean.py --resume runs/a" in said
