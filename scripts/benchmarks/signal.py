"""Where the signal is: how alike the gradients of disjoint batches are, by reward and by credit.

At the weights of the bundled model each batch is sampled once; its gradient is then taken with every reward
and credit. The mean cosine of two of them is held against what the noise scale of the other half predicts,
1 / (1 + scale / batch).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
from grpo.types import Prompt, Rollout
from rewards import REWARDS
from rewards.policy import PolicyReward
from rewards.weighted import WeightedReward

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


def signals(batches: int, rows: int) -> Iterator[Signal]:
    """Of each reward, alone on prompts of its task."""
    config = demo_config()
    policy = load_policy(config.model, choose_device("cpu"), config.precision)
    sampler = RolloutModel(policy.model, policy.target.dtype)
    prompts = load_prompts(config.prompts, seed=config.seed, heldout_count=1).draw(
        8 * batches * rows // config.group_size
    )
    for task, names in KINDS.items():
        sampled = list(_sampled([each for each in prompts if each.task == task], config, policy, sampler,
                                batches, rows))  # fmt: skip
        rewards: dict[str, WeightedReward] = {name: REWARDS[name] for name in names}
        if task == "policy":
            rewards |= {f"policy, {part}": PolicyReward("part", {part: 1.0}) for part in PARTS}
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
    batch = GRPOBatch(sampled, given, sampled.mask, counts).without_dull_groups()
    policy.model.zero_grad(set_to_none=True)
    accumulate_grpo(
        policy.model, batch, settings=replace(config.loss, kl_coef=0.0), temperature=1.0,
        dtype=policy.target.dtype, rows=64,
    )  # fmt: skip
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


def _signal(name: str, credit: str, rows: int, gradients: Sequence[torch.Tensor]) -> Signal:
    unit = torch.stack([gradient / gradient.norm() for gradient in gradients])
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
