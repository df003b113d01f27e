import dataclasses

import pytest
import torch
from rich.console import Console

from grpo.data.reward_functions import Scores
from grpo.memory.budget import DeviceMemory
from grpo.run.interrupt import StopRequest
from grpo.run.metrics import Doubts
from grpo.run.setup import open_run
from grpo.trainer import Trainer

EQUAL = (
    "no group of step {} has rewards that differ: nothing is learned from them; "
    "see --reward and --temperature"
)
CUT = (
    "{} of 20 completions of step {} were cut at max_new_tokens 32: raise it, or nothing ends; what would: "
    "<|im_end|>, <end>"
)


def warnings_of(logged: list[str]) -> list[str]:
    return [line.removeprefix("WARNING ") for line in logged if line.startswith("WARNING")]


SLOW = (
    "step 5 took 4.0 s, and others 1.0 s, with the memory full: a driver (on Windows and WSL), or a system "
    "that swaps, moves what does not fit; give a --memory-limit"
)
ENDS = ["<|im_end|>", "<end>"]
ROOMY, FULL = DeviceMemory(1000, 500, 400), DeviceMemory(1000, 19, 900)


def step(equal: float = 0, cut: int = 0, seconds: float = 1) -> dict[str, float]:
    return {"frac_reward_zero_std": equal, "completions/clipped_ratio": cut / 20, "step_time": seconds}


def test_each_doubt_is_said_once_a_run(logged):
    doubt = Doubts(20, 32, ENDS)
    doubt(1, step(equal=0.8, cut=17), ROOMY)
    assert warnings_of(logged) == []
    doubt(2, step(equal=1.0, cut=0), ROOMY)
    doubt(3, step(equal=1.0, cut=18), ROOMY)
    doubt(4, step(equal=1.0, cut=20), ROOMY)
    assert warnings_of(logged) == [EQUAL.format(2), CUT.format(18, 3)]


def test_a_step_that_is_suddenly_slow_in_a_full_memory_is_said_once(logged):
    doubt = Doubts(20, 32, ENDS)
    doubt(1, step(seconds=30), FULL)  # the first may be: kernels are loaded
    for number in (2, 3):
        doubt(number, step(), FULL)
    doubt(4, step(seconds=9), ROOMY)
    assert warnings_of(logged) == []
    doubt = Doubts(20, 32, ENDS)
    for number in range(1, 5):
        doubt(number, step(), FULL)
    doubt(5, step(seconds=4), FULL)
    doubt(6, step(seconds=9), FULL)
    assert warnings_of(logged) == [SLOW]


@pytest.mark.usefixtures("made_up_plans")
def test_a_run_that_learns_nothing_says_so(config, logged, monkeypatch):
    """All rewards the same, and a model that never ends."""
    config = dataclasses.replace(config, steps=2, eval_interval=0)
    monkeypatch.setattr(Scores, "rewards", property(lambda self: torch.zeros(len(self.table))))
    with open_run(config) as run:
        with torch.no_grad():
            run.policy.model.lm_head.weight[0] = 0
        Trainer(run, Console(quiet=True)).train(StopRequest())
    equal, cut = warnings_of(logged)
    assert equal == EQUAL.format(1)
    assert cut.startswith("8 of 8 completions of step 1 were cut at max_new_tokens 10: raise it, or")
