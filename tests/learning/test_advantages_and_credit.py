"""How much better a completion is than its siblings, where that goes, and groups that teach nothing."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.config.groups import LossSettings
from grpo.data.reward_functions import Judged, Scores
from grpo.learning.advantages import field_credit, group_advantages, zero_variance_groups
from grpo.learning.loss import loss_counts
from grpo.learning.objectives import accumulate_grpo, finish_grpo, with_advantage
from grpo.types import Batch, Prompt

NAN = math.nan


def test_two_groups_worked_out_by_hand():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.2, 1.4, 1.6, 1.8], dtype=torch.float64)
    # group 1: mean 0.5, squared deviations 4 * 0.25, sample variance 1/3
    first = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    # group 2: mean 1.5, squared deviations 2 * 0.09 + 2 * 0.01, sample variance 0.2 / 3
    second = math.sqrt(0.2 / 3) + 1e-4
    expected = [first, -first, first, -first, -0.3 / second, -0.1 / second, 0.1 / second, 0.3 / second]
    assert group_advantages(rewards, 4).tolist() == pytest.approx(expected, abs=1e-14)
    # the batch: mean 1, squared deviations 2 + 0.04 + 0.16 + 0.36 + 0.64, sample variance 3.2 / 7
    centred = [0.5, -0.5, 0.5, -0.5, -0.3, -0.1, 0.1, 0.3]
    expected = [d / (math.sqrt(3.2 / 7) + 1e-4) for d in centred]
    assert group_advantages(rewards, 4, scale="batch").tolist() == pytest.approx(expected, abs=1e-14)
    assert group_advantages(rewards, 4, scale="none").tolist() == pytest.approx(centred, abs=1e-14)
    assert group_advantages(torch.tensor([0, 1]), 2, scale="none").tolist() == [-0.5, 0.5]
    assert group_advantages(torch.tensor([0, 1]).bfloat16(), 2).dtype == torch.float32


@pytest.mark.parametrize(("scale", "size"), [("group", 3), ("batch", 7), ("none", 8), ("group", 11)])
def test_equal_rewards_give_exact_zeros_and_are_seen(scale, size):
    values = torch.linspace(0.01, 0.99, 99)
    assert (values.repeat_interleave(size).reshape(-1, size).mean(1) != values).any()  # the mean alone is off
    rewards = torch.cat([values.repeat_interleave(size), torch.arange(float(size))])
    advantages = group_advantages(rewards, size, scale=scale)
    assert (advantages[: 99 * size] == 0).all()
    assert (advantages[99 * size :] != 0).sum() >= size - 1
    rewards[-size:-1] = 0  # all but one are equal
    assert zero_variance_groups(rewards, size).tolist() == [True] * 99 + [False]


@given(st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_sum_to_zero_and_keep_the_order_within_a_group(groups):
    rewards = torch.tensor(groups, dtype=torch.float64)
    advantages = group_advantages(rewards.flatten(), 4).reshape(-1, 4)
    assert advantages.sum(1).abs().max() < 1e-9
    better = rewards.unsqueeze(2) > rewards.unsqueeze(1) + 1e-9
    assert (advantages.unsqueeze(2) > advantages.unsqueeze(1))[better].all()


def test_rewards_are_weighted_and_not_mine_adds_nothing():
    table = torch.tensor([[1.0, NAN], [NAN, 0.5], [0.25, 0.5]])
    scores = Scores(("a", "b"), table, torch.tensor([2.0, 4.0]), [], [], {}, *[torch.ones(3)] * 3)
    assert scores.rewards.tolist() == [2.0, 2.0, 2.5]


# ------------------------------------------------------------------------------------ credit by field


def sampled(rows: list[list[int]], groups: int = 1, text: str = "") -> Batch:
    """Completions of these tokens; prompts of two."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    return Batch.of_rows(
        [Prompt(str(group), "", {}) for group in range(groups)],
        [[1, 2]] * groups,
        ids,
        lengths,
        terminated=torch.ones(len(rows), dtype=torch.bool),
        sampler_logp=torch.zeros(ids.shape),
        texts=[text] * len(rows),
    )


class Letters:
    """Decodes a token to as many letters as its number says, the end of the text (0) to none."""

    def batch_decode(self, ids: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join("x" * token for token in row) for row in ids]


def credit_of(advantages, rewards, judged, made, scale="none"):
    """By token, in the order of rows."""
    return field_credit(advantages, rewards, judged, made, Letters(), scale=scale)


def credit_of_two(first, second, scale):
    """Plain advantages and credit of four rows whose tokens are a field each; row 1 has a token of both."""
    made = sampled([[2, 3], [1, 4], [2, 3], [2, 3]], text="xxxxx")
    judged = [Judged(first, [(0, 2)] * 4), Judged(second, [(2, 5)] * 4)]
    advantages = group_advantages(first + second, 4, scale=scale)
    return advantages, credit_of(advantages, first + second, judged, made, scale).view(4, 2)


def test_credit_goes_to_the_field_that_was_judged():
    """Two completions, "xx xxx x": the first component looks at letters 2 to 5, the second at 5 to the end.

    By hand: parts are +-1 and -+0.5, what is left of +-3 is for all.
    """
    made = sampled([[2, 3, 1, 0], [2, 3, 1, 0]], text="xxxxxx")
    judged = [
        Judged(torch.tensor([3.0, 1.0]), [(2, 5), (2, 5)]),
        Judged(torch.tensor([0.0, 1.0]), [(5, 6), (5, 6)]),
        Judged(torch.tensor([9.0, 9.0]), [(0, 6), (0, 6)]),
    ]
    credit = credit_of(torch.tensor([3.0, -3.0]), torch.tensor([4.0, -2.0]), judged, made)
    rest = 3.0 - 1.0 + 0.5
    expected = torch.tensor([rest, rest + 1.0, rest - 0.5, rest - 0.5])
    assert torch.allclose(credit, torch.cat([expected, -expected]))


def test_parts_are_divided_by_what_the_whole_is():
    """If everything is judged by fields that take turns, their sum is the plain advantage: as it is without a
    division, with the batch's deviation, and with the group's where the fields' variances add up.
    """
    parts = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    for scale in ("group", "batch", "none"):
        advantages, credit = credit_of_two(*parts, scale)
        assert credit[0].sum().item() == pytest.approx(advantages[0].item())  # its tokens are the fields
        assert credit[1, 1].item() == pytest.approx(advantages[1].item())  # a token of both


def test_fields_that_trade_off_are_no_more_than_a_deviation_apart():
    """(1, 0) and (0, 1) make equal totals, which teach nothing; where totals differ by a hair, parts are
    divided by the deviation of both, not by the hair's.
    """
    first = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    group, batch, none = (credit_of_two(first, 1 - first, scale)[1] for scale in ("group", "batch", "none"))
    assert not group.any() and batch.abs().max() < 1 and none[0].tolist() == [0.5, -0.5]
    hair = torch.tensor([0.0, 1.0, 1e-6, 1.0], dtype=torch.float64)
    apart = 0.5 / (2 / 3 + 1e-4) ** 0.5  # 0.5 from the mean of both, whose variances are 1/3 each
    assert credit_of_two(first, hair, "group")[1][0].tolist() == pytest.approx([apart, -apart], abs=0.02)


def test_what_cannot_be_cut_at_its_tokens_is_credited_as_a_whole():
    """A tokenizer whose pieces do not add up to the text, and a field that is missing."""
    made = replace(sampled([[2, 3], [2, 3]]), texts=["xxxxxx", "xxxxx"])
    given = torch.tensor([1.0, -1.0])
    credit = credit_of(given, given, [Judged(given, [(0, 2), (0, 2)])], made)
    assert credit.tolist() == [1.0, 1.0, -1.0, 0.0]
    nowhere = [Judged(given, [(9, 9), (9, 9)])]
    assert credit_of(given, given, nowhere, made).tolist() == [1, 1, -1, -1]


def batch_of(*, zero_variance: list[int], credit: str = "whole") -> Batch:
    """Five groups of two; those of zero variance have no advantage."""
    generator = torch.Generator().manual_seed(3)
    lengths = 3, 7, 5, 5, 2, 8, 4, 6, 1, 9
    rows = [torch.randint(1, 60, (length,), generator=generator).tolist() for length in lengths]
    made = sampled(rows, groups=5)
    advantages = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)
    advantages.view(5, 2)[zero_variance] = 0.0
    by_token = advantages[made.row]
    if credit == "field":
        by_token = by_token * (torch.cat([torch.arange(length) for length in lengths]) % 2)
    return made.with_columns(credit=by_token)


@pytest.mark.parametrize(
    ("loss_type", "credit", "zero_variance"),
    [
        ("grpo", "whole", [0]),
        ("grpo", "field", [1, 3, 4]),
        ("dapo", "whole", []),
        ("dapo", "field", [0]),
        ("dr_grpo", "whole", [1, 3, 4]),
        ("dr_grpo", "field", [0, 1, 2, 3, 4]),
        ("cispo", "whole", [0, 1, 2, 3, 4]),
        ("cispo", "field", [1, 3, 4]),
    ],
)
def test_zero_variance_groups_change_no_gradient(load, loss_type, credit, zero_variance):
    settings = LossSettings(loss_type=loss_type, kl_coef=0.0)
    model = load("gpt2", "fp64").model

    def gradient(batch: Batch) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        options = {"temperature": 1.0, "dtype": torch.float64, "rows": 4}
        sums = accumulate_grpo(model, batch, counts, settings=settings, **options)
        assert finish_grpo([sums], counts)["entropy"] > 0
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole = batch_of(zero_variance=zero_variance, credit=credit)
    counts = loss_counts(whole, 9)
    fewer = with_advantage(whole)
    assert len(fewer.prompts) == max(1, 5 - len(zero_variance))
    expected = gradient(whole)
    assert torch.linalg.norm(gradient(fewer) - expected) <= 1e-12 * max(1.0, torch.linalg.norm(expected))
