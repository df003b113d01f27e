"""Two processes, one with half the memory of the other: the steps of one process, and nobody waits."""

from typing import Any

import pytest
import torch
from benchmarks.trl_cases import GROUP, Case, Ours, Stock, difference, run
from loguru import logger
from several_processes import in_processes

pytestmark = pytest.mark.usefixtures("own_accelerator")
CASES = Case("dapo", "token", 0.04, 1, 2), Case("grpo", "sequence", 0.04, 2, 1)


def little_memory(trainer: Any) -> None:
    """Passes of more than a group run out of memory in the second process."""
    if trainer.accelerator.process_index == 0:
        return

    def forward(module: Any, given: Any, named: Any) -> None:
        if len(named["input_ids"]) > GROUP:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
    trainer.fit.plan = lambda phase, batch_size, tokens=1: batch_size  # until it runs out


def take_steps(rank: int) -> tuple[list[Any], str]:
    """What each case came to, and what was logged."""
    said: list[str] = []
    logger.add(said.append)
    done = [run(Ours, case, prepare=little_memory, processes=2) for case in CASES]
    torch.distributed.destroy_process_group()
    return done, "".join(said)


def test_two_unlike_processes_take_the_steps_of_one():
    ended = in_processes(2, take_steps)
    assert [each.error for each in ended] == [None] * 2
    (first, _), (second, said) = (each.value for each in ended)
    assert "learn: out of memory with" in said
    for case, mine, theirs in zip(CASES, first, second, strict=True):
        parameters, logged = difference(run(Stock, case), mine)
        assert parameters < 1e-10
        assert logged < 1e-10 or case.accumulation > 1  # a mean of means of rows that TRL shuffles
        for name, value in mine["parameters"].items():
            assert torch.equal(value, theirs["parameters"][name])
