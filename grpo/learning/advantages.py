"""Group-relative advantages, and which tokens of a completion they go to.

The only part of a step that needs a whole group at once. Everything here is a list of numbers in N rows of
consecutive groups, so it is computed before any split into micro-batches. Left out on purpose: normalising
each reward function by itself before summing (GDPO); unscored completions inside a group (an error here,
because a row that no reward function recognises is a mistake in the prompts or in the rewards); credit to the
tokens at which siblings part, by the mean of those that share the text so far (2505.23564, 2601.03703), which
was tried (docs/measurements.md, "What was tried").
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo.config.groups import Scale
from grpo.data.reward_functions import Judged
from grpo.errors import UserError
from grpo.types import Batch

_EPSILON = 1e-4  # TRL's, so that advantages carry over


def group_advantages(rewards: Tensor, group_size: int, *, scale: Scale = "group") -> Tensor:
    """Returns how much better each completion is than its siblings.

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


def component_advantages(
    parts: Tensor, rewards: Tensor, group_size: int, *, scale: Scale = "group"
) -> Tensor:
    """How much better each completion is than its siblings in each of F summands of the rewards: (F, N).

    parts: (F, N), which need not add up to rewards (N,). Each is divided by the deviation that rewards would
    have were their parts independent, the root of the summed variances: where parts trade off, (1, 0) and
    (0, 1) say, that of their sum may be 0. "group" takes it in each group, where equal rewards get zeros;
    "batch" takes the mean of the groups' variances, or the batch's deviation where that is more.
    """
    groups = _in_groups(rewards, group_size)  # (B, G)
    cut = parts.to(groups.dtype).reshape(len(parts), *groups.shape)  # (F, B, G)
    centred = cut - cut.mean(dim=2, keepdim=True)
    variances = cut.var(dim=2, keepdim=True).sum(dim=0)  # (B, 1)
    divisor = _deviation(groups, scale)
    if scale == "group":
        divisor = variances.sqrt() + _EPSILON
        centred = torch.where(_all_equal(groups).unsqueeze(1), 0.0, centred)
    elif scale == "batch":
        divisor = torch.maximum(torch.as_tensor(divisor), variances.mean().sqrt() + _EPSILON)
    return (centred / divisor).reshape(parts.shape)


def _deviation(groups: Tensor, scale: Scale) -> Tensor | float:
    """The deviation that advantages are divided by."""
    if scale == "group":
        return groups.std(dim=1, keepdim=True) + _EPSILON
    if scale not in ("batch", "none"):
        raise UserError(f"scale is {scale!r}; choose 'group', 'batch' or 'none'.")
    return groups.std() + _EPSILON if scale == "batch" else 1.0


def zero_variance_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Which groups teach nothing because all their rewards are equal: (N,) to bool (B,)."""
    return _all_equal(_in_groups(rewards, group_size))


def _all_equal(groups: Tensor) -> Tensor:
    return (groups == groups[:, :1]).all(dim=1)


def _in_groups(rewards: Tensor, group_size: int) -> Tensor:
    if group_size < 2:
        raise UserError(
            f"group_size is {group_size}: a completion needs siblings to be compared with, so 2 or more."
        )
    if rewards.ndim != 1 or rewards.numel() == 0 or rewards.numel() % group_size:
        raise UserError(
            f"Rewards of shape {tuple(rewards.shape)} are not whole groups of {group_size}: "
            "give one number for each completion, the completions of a prompt side by side."
        )
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).nonzero()[0])
        raise UserError(f"The reward of row {row} is {rewards[row].item()}; advantages need finite rewards.")
    return rewards.to(torch.promote_types(rewards.dtype, torch.float32)).reshape(-1, group_size)


def field_credit(
    advantages: Tensor,
    rewards: Tensor,
    judged: Iterable[Judged],
    batch: Batch,
    tokenizer: PreTrainedTokenizerBase,
    *,
    scale: Scale,
    first_row: int = 0,
) -> Tensor:
    """Returns each token's own advantage (K,): a component's goes to the tokens of the field that it judges.

    advantages: (N,), of `group_advantages(rewards)`, of the whole step, as are the values of `judged`; its
    letters are of the batch, which has the step's rows from `first_row` on. What no component accounts for
    goes to all tokens, as it does where a text cannot be cut at its tokens. Process supervision
    (DeepSeekMath, 2402.03300, section 4.1.3) gives a step's advantage to its tokens; here steps are fields.
    """
    letters = _letters(batch, tokenizer)  # (K,)
    whole = letters.cumsum(0)
    before = torch.cat([whole.new_zeros(1), whole])[batch.offsets[:-1]]  # (n,)
    ends = whole - before[batch.row]  # (K,) letters of its completion that are written after each token
    starts = ends - letters
    of_texts = torch.tensor([len(text) for text in batch.texts])  # (n,)
    is_unclear = (batch.sum_by_row(letters) != of_texts)[batch.row]
    fields, own = list(judged), slice(first_row, first_row + len(batch))  # F of them
    values = torch.stack([field.values for field in fields]) if fields else rewards.new_empty(0, len(rewards))
    group_size = batch.group_size
    parts = component_advantages(values, rewards, group_size, scale=scale)
    parts = parts.to(advantages.dtype)[:, own]  # (F, n)
    rest = advantages[own].clone()
    credit = torch.zeros(len(letters), dtype=advantages.dtype)
    for field, part in zip(fields, parts, strict=True):
        first, last = torch.tensor(field.char_spans).unbind(1)  # (n,)
        is_end = (last == of_texts)[batch.row]  # and what ends the text, which has no letters
        first, last = first[batch.row], last[batch.row]
        is_whole = (first == 0) & is_end | is_unclear
        of_field = (ends > first) & ((starts < last) | is_end) & ~is_whole  # (K,)
        credit += part[batch.row] * of_field
        rest -= part * (batch.sum_by_row(of_field.long()) > 0)
    return credit + rest[batch.row]


def _letters(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Counts the letters that each token writes: (K,)."""
    known, places = batch.ids.unique(return_inverse=True)
    texts = tokenizer.batch_decode(known.unsqueeze(1).tolist(), skip_special_tokens=True)
    return torch.tensor([len(text) for text in texts], dtype=torch.long)[places]
