"""Where the signal is: how alike the gradients of disjoint batches are, by reward and by credit.

At the weights of the bundled model each batch is sampled once; its gradient is then taken with every reward
and credit. The mean cosine of two of them is held against what the noise scale of the other half predicts,
1 / (1 + scale / batch).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from rich import box
from rich.table import Table

from benchmarks.learning import demo_config
from grpo.config import Config
from grpo.config.groups import Credit
from grpo.data import collate, load_prompts
from grpo.data.reward_functions import judged_by
from grpo.learning.advantages import group_advantages
from grpo.learning.credit import field_credit
from grpo.learning.loss import loss_counts
from grpo.learning.noise import GradientSum
from grpo.learning.objectives import GRPOBatch, accumulate_grpo
from grpo.model.load import Policy, RolloutModel, load_policy
from grpo.model.target import choose_device
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.setup import NOISE_INTERVAL
from grpo.types import Prompt, Rollout
from rewards import REWARDS
from rewards.policy import PolicyReward
from rewards.weighted import WeightedReward

LEAST_BATCHES = 6
"""Of which each half has a noise scale."""
CREDITS: tuple[Credit, ...] = ("whole", "field")
KINDS = {
    "environment": ("environment", "environment-gain", "environment-sparse"),
    "policy": ("policy", "policy-legal", "policy-best"),
}
PARTS = ("best_move", "format", "move_candidates", "evaluations")
"""Of the policy's reward, each by itself."""


@dataclass(frozen=True)
class Signal:
    """cosine: the mean of all pairs. predicted: by the noise scale of the other half; None: it has none."""

    reward: str
    credit: str
    rows: int
    cosine: float
    error: float
    predicted: float | None


def signals(batches: int, rows: int, only: str = "") -> Iterator[Signal]:
    """Of each reward whose name holds `only`, alone on prompts of its task."""
    config = demo_config()
    policy = load_policy(config.model, choose_device("cpu"), config.precision)
    sampler = RolloutModel(policy.model, policy.target.dtype)
    prompts = load_prompts(config.prompts, seed=config.seed, heldout_count=1).draw(
        8 * batches * rows // config.group_size
    )
    for task, names in KINDS.items():
        rewards: dict[str, WeightedReward] = {name: REWARDS[name] for name in names}
        if task == "policy":
            rewards |= {f"policy, {part}": PolicyReward("part", {part: 1.0}) for part in PARTS}
        rewards = {name: reward for name, reward in rewards.items() if only in name}
        if not rewards:
            continue
        sampled = list(_sampled([each for each in prompts if each.task == task], config, policy, sampler,
                                batches, rows))  # fmt: skip
        for name, reward in rewards.items():
            for credit in CREDITS:
                gradients = [_gradient(policy, config, each, reward, credit) for each in sampled]
                yield _signal(name, credit, rows, gradients)


def _sampled(
    prompts: Sequence[Prompt], config: Config, policy: Policy, sampler: RolloutModel, batches: int, rows: int
) -> Iterator[Rollout]:
    groups = rows // config.group_size
    for number in range(batches):
        uniforms = step_uniforms(rows, config.sampling.max_new_tokens, seed=number, step=0)
        some = prompts[number * groups : (number + 1) * groups]
        yield rollout(sampler.model, policy.tokenizer, some, uniforms, config.sampling, rows=rows)


def _gradient(
    policy: Policy, config: Config, sampled: Rollout, reward: WeightedReward, credit: Credit
) -> torch.Tensor:
    policy.model.zero_grad(set_to_none=True)
    _learn(policy, config, _batch(policy, config, sampled, reward, credit), rows=64)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


def _batch(
    policy: Policy, config: Config, sampled: Rollout, reward: WeightedReward, credit: Credit
) -> GRPOBatch:
    texts = [prompt.text for prompt in sampled.row_prompts]
    rows = [
        row or {} for row in reward.components(texts, sampled.completions, **collate(sampled.row_prompts))
    ]
    scores = torch.tensor([reward.mean(row) or 0.0 for row in rows], dtype=torch.float64)
    given = advantages = group_advantages(scores, config.group_size, scale="batch")
    if credit == "field":
        judged = judged_by(reward, rows, sampled.completions)
        given = field_credit(advantages, scores, judged, sampled, policy.tokenizer, scale="batch")
    counts = loss_counts(sampled.mask, config.sampling.max_new_tokens)
    return GRPOBatch(sampled, given, sampled.mask, counts).without_dull_groups()


def _learn(
    policy: Policy, config: Config, batch: GRPOBatch, *, rows: int, noise_share: float | None = None
) -> None:
    accumulate_grpo(
        policy.model, batch, settings=replace(config.loss, kl_coef=0.0), temperature=1.0,
        dtype=policy.target.dtype, rows=rows, pass_tokens=policy.target.pass_tokens, noise_share=noise_share,
    )  # fmt: skip


def _signal(name: str, credit: str, rows: int, gradients: Sequence[torch.Tensor]) -> Signal:
    unit = torch.nn.functional.normalize(torch.stack(gradients))  # a batch without advantages has none: 0
    cosines = (unit @ unit.T)[tuple(torch.triu_indices(len(unit), len(unit), 1))]
    halves = gradients[: len(gradients) // 2], gradients[len(gradients) // 2 :]
    predicted = []
    for half in halves:
        parameter = torch.nn.Parameter(torch.zeros_like(half[0]))
        total = GradientSum([parameter], rows)
        for gradient in half:
            parameter.grad = gradient
            total.add()
        scale, _, _ = total.rows()
        predicted += [] if scale is None else [1 / (1 + scale / rows)]
    return Signal(
        name, credit, rows, cosines.mean().item(), cosines.std().item() / len(cosines) ** 0.5,
        sum(predicted) / len(predicted) if len(predicted) == len(halves) else None,
    )  # fmt: skip


def signal_table(found: Sequence[Signal]) -> Table:
    title = f"Cosine between gradients of {found[0].rows} rows"
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for column in ("reward", "credit", "cosine", "by the noise scale", "noise scale, rows"):
        table.add_column(column, justify="left" if column in ("reward", "credit") else "right")
    for each in found:
        scale = each.rows * (1 / each.cosine - 1) if each.cosine > 0 else None
        table.add_row(
            each.reward, each.credit, f"{each.cosine:.3f} ± {2 * each.error:.3f}",
            "" if each.predicted is None else f"{each.predicted:.3f}",
            "" if scale is None else f"{scale:,.0f}",
        )  # fmt: skip
    return table


def _whole_step(rows: int) -> tuple[Policy, Config, GRPOBatch]:
    """What a step of the demo learns from, with the reward that differs in nearly every group."""
    config = demo_config()
    policy = load_policy(config.model, choose_device("cpu"), config.precision)
    sampler = RolloutModel(policy.model, policy.target.dtype)
    prompts = load_prompts(config.prompts, seed=config.seed, heldout_count=1).draw(rows // config.group_size)
    (sampled,) = _sampled(prompts, config, policy, sampler, 1, rows)
    return policy, config, _batch(policy, config, sampled, REWARDS["policy"], "whole")


def _seconds(
    policy: Policy, config: Config, batch: GRPOBatch, rows: int, noise_share: float | None = None
) -> float:
    policy.model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    _learn(policy, config, batch, rows=rows, noise_share=noise_share)
    return time.perf_counter() - start


def overheads(rows: int, repeats: int) -> Iterator[tuple[int, list[tuple[float, float]]]]:
    """(rows a micro-batch, seconds of learning from a step without and with its noise, in turns)."""
    policy, config, batch = _whole_step(rows)
    for size in (rows, rows // 4):
        seconds: list[tuple[float, float]] = []
        for number in range(repeats + 1):
            kinds = (None, 1.0) if number % 2 else (1.0, None)
            pair = {share: _seconds(policy, config, batch, size, share) for share in kinds}
            seconds.append((pair[None], pair[1.0]))
        yield size, seconds[1:]  # the first is to warm up


def dull_groups(rows: int, repeats: int) -> dict[float, float]:
    """By share of groups without an advantage: seconds of learning from a step (medians, in turns)."""
    policy, config, batch = _whole_step(rows)
    batches = {}
    for share in (0.0, 0.25, 0.5, 0.75):
        advantages = batch.advantages.clone()
        advantages[: int(share * len(advantages))] = 0
        batches[share] = replace(batch, advantages=advantages).without_dull_groups()
    seconds: dict[float, list[float]] = {share: [] for share in batches}
    for _ in range(repeats + 1):
        for share, part in batches.items():
            seconds[share].append(_seconds(policy, config, part, 64))
    return {share: median(times[1:]) for share, times in seconds.items()}


def dull_table(found: dict[float, float], rows: int) -> Table:
    table = Table(title=f"Learning from a step of {rows} rows", title_justify="left", box=box.MARKDOWN)
    for column in ("dull groups", "seconds", "times"):
        table.add_column(column, justify="right")
    for share, seconds in found.items():
        table.add_row(f"{share:.0%}", f"{seconds:.2f}", f"{seconds / found[0.0]:.2f}")
    return table


def overhead_table(found: Sequence[tuple[int, list[tuple[float, float]]]], rows: int) -> Table:
    table = Table(title=f"Noise of a step of {rows} rows", title_justify="left", box=box.MARKDOWN)
    for column in ("rows a micro-batch", "learning, s", "with its noise", "times", "more, of all steps"):
        table.add_column(column, justify="right")
    for size, seconds in found:
        times = median(after / before for before, after in seconds)
        table.add_row(
            str(size), *(f"{median(each):.2f}" for each in zip(*seconds, strict=True)), f"{times:.3f}",
            f"{(times - 1) / NOISE_INTERVAL:+.1%}",
        )  # fmt: skip
    return table


def signal_verdicts(found: Sequence[Signal]) -> dict[str, bool]:
    """What stands out from few batches of 256 rows: the simplest reward of transitions."""
    return {
        f"{each.reward}, {each.credit}: {each.cosine:.3f} is above the error, {2 * each.error:.3f}":
        each.cosine > 2 * each.error
        for each in found
        if each.reward == "environment-sparse"
    }  # fmt: skip


def overhead_verdicts(found: Sequence[tuple[int, list[tuple[float, float]]]]) -> dict[str, bool]:
    times = {size: median(after / before for before, after in seconds) for size, seconds in found}
    return {f"{size} rows: {ratio:.2f} times (at most 1.2)": ratio <= 1.2 for size, ratio in times.items()}


def dull_verdicts(found: dict[float, float]) -> dict[str, bool]:
    times = {share: seconds / found[0.0] for share, seconds in found.items()}
    return {f"half of the groups dull: {times[0.5]:.2f} of the time (at most 0.7)": times[0.5] <= 0.7,
            f"three quarters: {times[0.75]:.2f} (at most 0.45)": times[0.75] <= 0.45}  # fmt: skip
