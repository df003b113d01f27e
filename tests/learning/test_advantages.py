import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.data.reward_functions import combine_rewards
from grpo.learning.advantages import group_advantages, zero_variance_groups

NAN = math.nan


def test_two_groups_worked_out_by_hand():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    # group 1: mean 0.5, squared deviations 4 * 0.25, sample variance 1/3
    first = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    # group 2: mean 0.5, squared deviations 2 * 0.09 + 2 * 0.01, sample variance 0.2 / 3
    second = math.sqrt(0.2 / 3) + 1e-4
    expected = [first, -first, first, -first, -0.3 / second, -0.1 / second, 0.1 / second, 0.3 / second]
    assert group_advantages(rewards, 4).tolist() == pytest.approx(expected, abs=1e-14)
    # the batch: mean 0.5, squared deviations 1 + 0.2, sample variance 1.2 / 7
    batch = math.sqrt(1.2 / 7) + 1e-4
    expected = [d / batch for d in (0.5, -0.5, 0.5, -0.5, -0.3, -0.1, 0.1, 0.3)]
    assert group_advantages(rewards, 4, scale="batch").tolist() == pytest.approx(expected, abs=1e-14)
    expected = [0.5, -0.5, 0.5, -0.5, -0.3, -0.1, 0.1, 0.3]
    assert group_advantages(rewards, 4, scale="none").tolist() == pytest.approx(expected, abs=1e-14)


def test_groups_do_not_see_each_other():
    rewards = torch.tensor([0.0, 1.0, 10.0, 20.0])
    assert torch.equal(group_advantages(rewards, 2)[:2], group_advantages(rewards[:2], 2))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [3, 7, 8, 11])
def test_equal_rewards_give_exact_zeros(scale, size):
    values = torch.linspace(0.01, 0.99, 99)
    assert (values.repeat_interleave(size).reshape(-1, size).mean(1) != values).any()  # the mean alone is off
    rewards = torch.cat([values.repeat_interleave(size), torch.arange(float(size))])
    advantages = group_advantages(rewards, size, scale=scale)
    assert (advantages[: 99 * size] == 0).all()
    assert (advantages[99 * size :] != 0).sum() >= size - 1


def test_zero_variance_groups_are_those_without_a_difference():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.0, 0.0, 0.0])
    assert zero_variance_groups(rewards, 3).tolist() == [True, False, True]


@given(st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_sum_to_zero_and_keep_the_order_within_a_group(groups):
    rewards = torch.tensor(groups, dtype=torch.float64)
    advantages = group_advantages(rewards.flatten(), 4).reshape(-1, 4)
    assert advantages.sum(1).abs().max() < 1e-9
    better = rewards.unsqueeze(2) > rewards.unsqueeze(1) + 1e-9
    assert (advantages.unsqueeze(2) > advantages.unsqueeze(1))[better].all()


def test_integer_and_half_rewards_are_computed_in_fp32():
    assert group_advantages(torch.tensor([0, 1]), 2, scale="none").tolist() == [-0.5, 0.5]
    assert group_advantages(torch.tensor([0, 1]).bfloat16(), 2).dtype == torch.float32


def test_rewards_are_weighted_and_not_mine_adds_nothing():
    rewards = torch.tensor([[1.0, NAN], [NAN, 0.5], [0.25, 0.5]])
    assert combine_rewards(rewards, torch.tensor([2.0, 4.0])).tolist() == [2.0, 2.0, 2.5]


def test_a_row_nobody_scored_is_named():
    with pytest.raises(ValueError, match=r"row 1 \(2 of 3 rows\)"):
        combine_rewards(torch.tensor([[1.0, NAN], [NAN, NAN], [NAN, NAN]]), torch.ones(2))


def test_wrong_shapes_and_sizes_are_explained():
    with pytest.raises(ValueError, match="one weight for each"):
        combine_rewards(torch.ones(3, 2), torch.ones(3))
    with pytest.raises(ValueError, match="whole groups of 4"):
        group_advantages(torch.ones(6), 4)
    with pytest.raises(ValueError, match="siblings"):
        group_advantages(torch.ones(6), 1)
    with pytest.raises(ValueError, match="'batch'"):
        group_advantages(torch.ones(6), 2, scale="std")
    for bad in (NAN, math.inf):
        with pytest.raises(ValueError, match="row 2"):
            group_advantages(torch.tensor([0.0, 1.0, bad, 1.0]), 2)
