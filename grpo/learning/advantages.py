"""Group-relative advantages: the only part of a step that needs a whole group at once.

Everything here is a list of N numbers in rows of consecutive groups, so it is computed before any
split into micro-batches. Left out on purpose: normalising each reward function by itself before
summing (GDPO), and unscored completions inside a group (an error here, because a row that no
reward function recognises is a mistake in the prompts or in the rewards).
"""

import torch
from torch import Tensor

from grpo.config.groups import Scale

_EPSILON = 1e-4  # TRL's, so that advantages carry over


def group_advantages(rewards: Tensor, group_size: int, *, scale: Scale = "group") -> Tensor:
    """How much better each completion is than its siblings.

    rewards: (N,) in rows of consecutive groups. Returns (N,), zero mean in each group, in fp32 or
    finer. `scale` "group" divides by the group's sample standard deviation + 1e-4 (DeepSeekMath,
    section 4.1.2), "batch" by the batch's (PPO Lite, 2508.08221), "none" by nothing (Dr. GRPO,
    2503.20783). A group of equal rewards gets exact zeros. ValueError when N is no multiple of
    the group size or a reward is not finite.
    """
    groups = _in_groups(rewards, group_size)  # (B, G)
    centred = (groups - groups.mean(dim=1, keepdim=True)) / _deviation(groups, scale)
    # The mean of equal numbers is often one rounding off them, and 1e-4 below magnifies that.
    return torch.where(_all_equal(groups).unsqueeze(1), 0.0, centred).reshape(-1)


def part_advantages(values: Tensor, rewards: Tensor, group_size: int, *, scale: Scale = "group") -> Tensor:
    """The part of `group_advantages(rewards)` that comes from `values` (N,), a summand of them: (N,)."""
    groups, parts = _in_groups(rewards, group_size), _in_groups(values, group_size)
    return ((parts - parts.mean(dim=1, keepdim=True)) / _deviation(groups, scale)).reshape(-1)


def _deviation(groups: Tensor, scale: Scale) -> Tensor | float:
    """What advantages are divided by."""
    if scale == "group":
        return groups.std(dim=1, keepdim=True) + _EPSILON
    if scale == "batch":
        return groups.std() + _EPSILON
    if scale == "none":
        return 1.0
    raise ValueError(f"scale is {scale!r}; choose 'group', 'batch' or 'none'.")


def zero_variance_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Which groups teach nothing because all their rewards are equal: (N,) to bool (B,)."""
    return _all_equal(_in_groups(rewards, group_size))


def _all_equal(groups: Tensor) -> Tensor:
    return (groups == groups[:, :1]).all(dim=1)


def _in_groups(rewards: Tensor, group_size: int) -> Tensor:
    if group_size < 2:
        raise ValueError(
            f"group_size is {group_size}: a completion needs siblings to be compared with, so 2 or more."
        )
    if rewards.ndim != 1 or rewards.numel() == 0 or rewards.numel() % group_size:
        raise ValueError(
            f"Rewards of shape {tuple(rewards.shape)} are not whole groups of {group_size}: "
            "give one number for each completion, the completions of a prompt side by side."
        )
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"The reward of row {row} is {rewards[row].item()}; advantages need finite rewards.")
    return rewards.to(torch.promote_types(rewards.dtype, torch.float32)).reshape(-1, group_size)
