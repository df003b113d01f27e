"""What runs in the processes of test_shard.py: each function in two of them, rank first."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which FSDP2 loads when it is first used, for seconds
from benchmarks.real_phases import RealPhases, Setting, own_meter
from conftest import CPU, let_norms_be_exact, untraced
from rich.console import Console
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from grpo.config import Config
from grpo.config.groups import SamplingSettings
from grpo.distributed.shard import part_like, shard_model, whole
from grpo.memory import Shape
from grpo.model.load import Policy, frozen_copy, load_policy
from grpo.model.prefill import pad_prompts
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.scoring.micro_batches import MicroBatch, micro_batch_logprobs
from grpo.scoring.model_checks import check_recomputation
from grpo.trainer import Trainer
from grpo.types import Prompt

GROUP, NEW_TOKENS = 2, 12


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _twins(folder: Path) -> tuple[Policy, PreTrainedModel]:
    """A policy in float64, which is sharded, and its like, which is whole."""
    policy = load_policy(str(folder), CPU, "fp64")
    let_norms_be_exact(policy.model)
    one = frozen_copy(policy.model).requires_grad_(True)
    let_norms_be_exact(one)
    shard_model(policy.model, torch.float64, CPU)
    return policy, one


def _batches(rank: int) -> list[MicroBatch]:
    """Two micro-batches; the second process has completions of one token in one of them."""
    generator = torch.Generator().manual_seed(rank)

    def batch(width: int) -> MicroBatch:
        prompts = [torch.randint(1, 60, (length,), generator=generator).tolist() for length in (5, 9)]
        tokens = torch.randint(1, 60, (4, width), generator=generator)
        return MicroBatch(torch.arange(4), pad_prompts(prompts), torch.tensor([0, 0, 1, 1]), tokens)

    return [batch(7), batch(1 if rank else 5)]


def gradient_errors(rank: int, folder: Path) -> list[float]:
    """Of summed gradients against a whole model's over all rows, relative; plain, recomputed, and again."""
    with process_group():
        policy, one = _twins(folder)
        errors = []
        for checkpointing in ("none", "full", "full", "selective"):
            policy.model.zero_grad(set_to_none=True)
            one.zero_grad(set_to_none=True)
            for model, ranks in ((policy.model, [rank]), (one, [0, 1])):
                for batch in (batch for of in ranks for batch in _batches(of)):
                    logp, _ = micro_batch_logprobs(
                        model, batch, temperature=1.0, dtype=torch.float64, checkpointing=checkpointing
                    )
                    logp.sum().backward()
            pairs = zip(policy.model.parameters(), one.parameters(), strict=True)
            mine, theirs = zip(*((whole(p.grad).flatten(), q.grad.flatten()) for p, q in pairs), strict=True)
            errors.append(((torch.cat(mine) - torch.cat(theirs)).norm() / torch.cat(theirs).norm()).item())
        policy.model.zero_grad(set_to_none=True)
        check_recomputation(policy.model, "selective")
        return errors


def rollouts(rank: int, folder: Path, prompts: list[Prompt]) -> tuple[Any, list[int]]:
    """Tokens and log-probs of this process's prompts, and how often weights were gathered.

    By a sharded model, by it with weights that stay, and by one that is whole.
    """
    with process_group():
        policy, one = _twins(folder)
        settings = SamplingSettings(max_new_tokens=NEW_TOKENS)
        uniforms = step_uniforms(GROUP * len(prompts), NEW_TOKENS, seed=3, step=0)
        half = len(prompts) // 2
        own, own_uniforms = prompts[rank * half :][:half], uniforms[rank * half * GROUP :][: half * GROUP]
        made, gathers = [], []
        for model, stay_gathered in ((policy.model, False), (policy.model, True), (one, False)):
            with Gathers() as counted:
                made.append(
                    rollout(
                        model, policy.tokenizer, own, own_uniforms, settings, rows=2 * GROUP,
                        stay_gathered=stay_gathered,
                    )
                )  # fmt: skip
            gathers.append(counted.count)
        held = sum(p.to_local().numel() for p in policy.model.parameters())  # ValueError: not parted again
        assert held < sum(p.numel() for p in one.parameters())
        return tuple((each.completion_ids.numpy(), each.sampler_logp.numpy()) for each in made), gathers


class Gathers(TorchDispatchMode):
    """Counts how often weights are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "all_gather_copy_in" in str(func)
        return func(*args, **(kwargs or {}))


def added_bytes(rank: int, setting: Setting, shape: Shape, phases: tuple[str, ...]) -> dict[str, int]:
    """What each phase of a sharded model holds at its peak, by the meter that training calibrates with."""
    with process_group():
        real = RealPhases(setting)
        real.shard()
        for phase in phases:  # the first time kernels and buffers are set up
            real.prepare(phase, shape)()
        return {phase: own_meter(real.prepare(phase, shape)) for phase in phases}


def parts(rank: int) -> list[float]:
    """This process's part of 0 to 4, as it is put together again."""
    with process_group():
        layer = torch.nn.Linear(1, 5, bias=False)
        torch.distributed.fsdp.fully_shard(layer)
        mine = layer.weight.detach()
        mine.copy_(part_like(torch.arange(5.0).view(5, 1), mine))
        assert mine.to_local().numel() < 5
        return whole(mine).flatten().tolist()


def trained(rank: int, config: Config) -> Path:
    """The folder of a run."""
    torch.manual_seed(0)
    with untraced(), open_run(config) as run:
        let_norms_be_exact(run.policy.model)
        assert run.reference is not None
        with run.reference.model() as reference:
            let_norms_be_exact(reference)
        Trainer(run, Console(quiet=True)).train(StopRequest())
        return run.folder
