"""Functions that run in the processes of test_shard.py: each in two of them, rank first."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which FSDP2 loads when it is first used, for seconds
from conftest import CPU, let_norms_be_exact, untraced
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from whole_runs import train

from grpo.config import Config
from grpo.config.groups import SamplingSettings
from grpo.distributed.shard import shard_model, whole
from grpo.memory import Budget, PassSize
from grpo.model.load import load_policy
from grpo.model.weights import frozen_copy
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.scoring.logprobs import token_logprobs
from grpo.scoring.stream import Stream, make_stream
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


def _streams(rank: int) -> list[Stream]:
    """Two streams; the second process has completions of one token in one of them."""
    generator = torch.Generator().manual_seed(rank)

    def stream(width: int) -> Stream:
        prompts = [torch.randint(1, 60, (length,), generator=generator).tolist() for length in (5, 9)]
        tokens = torch.randint(1, 60, (4, width), generator=generator)
        return make_stream(prompts, [0, 0, 1, 1], tokens.tolist())

    return [stream(7), stream(1 if rank else 5)]


def compared(rank: int, folder: Path, prompts: list[Prompt]) -> tuple[list[float], Any, list[int]]:
    """Errors of gradients; tokens and log-probs of this process's prompts; how often weights were gathered.

    Summed gradients against a whole model's over all rows, relative; plain, recomputed, and again. Tokens by
    a sharded model, by it with weights that stay, and by one that is whole.
    """
    with process_group():
        policy = load_policy(str(folder), CPU, "fp64")
        one = frozen_copy(policy.model).requires_grad_(True)  # which stays whole
        for model in (policy.model, one):
            let_norms_be_exact(model)
        shard_model(policy.model, torch.float64, CPU)
        errors = []
        for checkpointing in ("none", "full", "full"):
            for model, batches in ((policy.model, _streams(rank)), (one, _streams(0) + _streams(1))):
                model.zero_grad(set_to_none=True)
                for batch in batches:
                    token_logprobs(
                        model,
                        batch,
                        temperature=1.0,
                        dtype=torch.float64,
                        checkpointing=checkpointing,
                        slope=lambda logp, _: torch.ones_like(logp),
                    )
            mine = torch.cat([whole(p.grad).flatten() for p in policy.model.parameters()])
            theirs = torch.cat([p.grad.flatten() for p in one.parameters()])
            errors.append(((mine - theirs).norm() / theirs.norm()).item())
        policy.model.zero_grad(set_to_none=True)

        settings = SamplingSettings(max_new_tokens=NEW_TOKENS)
        uniforms = step_uniforms(GROUP * len(prompts), NEW_TOKENS, seed=3, step=0)
        half = len(prompts) // 2
        own, own_uniforms = prompts[rank * half :][:half], uniforms[rank * half * GROUP :][: half * GROUP]
        made, gathers = [], []
        for model, stay_gathered in ((policy.model, False), (policy.model, True), (one, False)):
            given = model, policy.tokenizer, own, own_uniforms, settings
            with Gathers() as counted:
                each = rollout(*given, rows=2 * GROUP, stay_gathered=stay_gathered)
            made.append((each.ids.numpy(), each.sampler_logp.numpy()))
            gathers.append(counted.count)
        held = sum(p.to_local().numel() for p in policy.model.parameters())  # ValueError: not parted again
        assert held < sum(p.numel() for p in one.parameters())
        return errors, made, gathers


class Gathers(TorchDispatchMode):
    """Counts how often weights are put together."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "all_gather_copy_in" in str(func)
        return func(*args, **(kwargs or {}))


def rows_taken(rank: int, config: Config) -> tuple[dict[str, int], dict[str, int], dict[str, int | None]]:
    """By phase: rows as planned, and after steps in which one has no room to learn from two groups; bytes."""
    with open_run(config) as run:
        planned = run.fit.planned()
        if rank:
            texts = config.max_new_tokens, run.longest_prompt
            room = int(sum(run.fit.predict("learn", PassSize(rows, *texts)) for rows in (4, 8)) / 2)
            run.device.slack, run.device.used_bytes = 0.0, lambda: 0
            run.device.budget, run.device.room_bytes = lambda: Budget(room, "test"), lambda: room
        Trainer(run).train(StopRequest())
        added = {phase: largest.added_bytes for phase, largest in run.measured.largest.items()}
        return planned, run.fit.planned(), added


def trained(rank: int, config: Config) -> Path:
    """The folder of a run."""

    def be_exact(trainer: Trainer) -> None:
        let_norms_be_exact(trainer.model)
        assert trainer.run.reference is not None
        with trainer.run.reference.model() as reference:
            let_norms_be_exact(reference)

    torch.manual_seed(0)
    with untraced():
        return train(config, be_exact)
