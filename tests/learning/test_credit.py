"""Which tokens a completion's advantage goes to, and groups that teach nothing."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from grpo.config import SettingsError
from grpo.config.groups import LossSettings
from grpo.data.reward_functions import Judged
from grpo.learning.advantages import group_advantages
from grpo.learning.credit import field_credit
from grpo.learning.loss import loss_counts
from grpo.learning.objectives import GRPOBatch, accumulate_grpo, finish_grpo
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.tracking import METRICS_FILE, read_lines
from grpo.trainer import Trainer
from grpo.types import Prompt, Rollout


def rollout_of(rows: list[list[int]], groups: int = 1) -> Rollout:
    """Completions of these tokens; prompts of two."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    return Rollout(
        [Prompt(str(group), "", {}) for group in range(groups)], [[1, 2]] * groups, ids, lengths,
        torch.ones(len(rows), dtype=torch.bool), torch.zeros(ids.shape), [""] * len(rows),
    )  # fmt: skip


class Letters:
    """Decodes a token to as many letters as its number says, the end of the text (0) to none."""

    def batch_decode(self, ids: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join("x" * token for token in row) for row in ids]


def test_credit_goes_to_the_field_that_was_judged():
    """Two completions, "xx xxx x": the first component looks at letters 2 to 5, the second at 5 to the end.

    By hand: parts are +-1 and -+0.5, what is left of +-3 is for all.
    """
    made = replace(rollout_of([[2, 3, 1, 0], [2, 3, 1, 0]]), completions=["xxxxxx", "xxxxxx"])
    rewards = torch.tensor([4.0, -2.0])
    judged = [
        Judged(torch.tensor([3.0, 1.0]), [(2, 5), (2, 5)]),
        Judged(torch.tensor([0.0, 1.0]), [(5, 6), (5, 6)]),
        Judged(torch.tensor([9.0, 9.0]), [(0, 6), (0, 6)]),
    ]
    credit = field_credit(torch.tensor([3.0, -3.0]), rewards, judged, made, Letters(), scale="none")
    rest = 3.0 - 1.0 + 0.5
    expected = torch.tensor([rest, rest + 1.0, rest - 0.5, rest - 0.5])
    assert torch.allclose(credit, torch.stack([expected, -expected]))


def test_parts_are_divided_by_what_the_whole_is():
    """Where everything is judged by fields that take turns, their sum is the plain advantage: as it is
    without a division, with the batch's deviation, and with the group's where the fields' variances add up.
    """
    made = replace(rollout_of([[2, 3], [1, 4], [2, 3], [2, 3]]), completions=["xxxxx"] * 4)
    parts = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    for scale in ("group", "batch", "none"):
        advantages = group_advantages(parts.sum(0), 4, scale=scale)
        judged = [Judged(parts[0], [(0, 2)] * 4), Judged(parts[1], [(2, 5)] * 4)]
        credit = field_credit(advantages, parts.sum(0), judged, made, Letters(), scale=scale)
        first, last = credit[0].tolist()  # its tokens are the fields
        assert first + last == pytest.approx(advantages[0].item())
        assert credit[1, 1].item() == pytest.approx(advantages[1].item())  # a token of both


def test_fields_that_trade_off_are_no_more_than_a_deviation_apart():
    """Two fields of a token each: (1, 0) and (0, 1) make equal totals, which teach nothing; where totals
    differ by a hair, parts are divided by the deviation of both, not by the hair's.
    """
    made = replace(rollout_of([[2, 3]] * 4), completions=["xxxxx"] * 4)
    first = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)

    def credit(second, scale):
        rewards = first + second
        judged = [Judged(first, [(0, 2)] * 4), Judged(second, [(2, 5)] * 4)]
        advantages = group_advantages(rewards, 4, scale=scale)
        return field_credit(advantages, rewards, judged, made, Letters(), scale=scale)

    assert credit(1 - first, "group").tolist() == [[0.0, 0.0]] * 4
    assert credit(1 - first, "batch").abs().max() < 1
    assert credit(1 - first, "none")[0].tolist() == [0.5, -0.5]
    hair = torch.tensor([0.0, 1.0, 1e-6, 1.0], dtype=torch.float64)
    apart = 0.5 / (2 / 3 + 1e-4) ** 0.5  # 0.5 from the mean of both, whose variances are 1/3 each
    found = credit(hair, "group")
    assert found[0].tolist() == pytest.approx([apart, -apart], abs=0.02)


def test_what_cannot_be_cut_at_its_tokens_is_credited_as_a_whole():
    """A tokenizer whose pieces do not add up to the text, and a field that is missing."""
    made = replace(rollout_of([[2, 3], [2, 3]]), completions=["xxxxxx", "xxxxx"])
    advantages, values = torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])
    credit = field_credit(
        advantages, values, [Judged(values, [(0, 2), (0, 2)])], made, Letters(), scale="none"
    )
    assert credit.tolist() == [[1.0, 1.0], [-1.0, 0.0]]
    nowhere = [Judged(values, [(9, 9), (9, 9)])]
    assert field_credit(advantages, values, nowhere, made, Letters(), scale="none").tolist() == [
        [1, 1],
        [-1, -1],
    ]


def batch_of(*, dull: list[int], credit: str = "whole") -> GRPOBatch:
    """Five groups of two; the dull ones have no advantage."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randint(1, 60, (length,), generator=generator).tolist()
        for length in (3, 7, 5, 5, 2, 8, 4, 6, 1, 9)
    ]
    made = rollout_of(rows, groups=5)
    advantages = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)
    for group in dull:
        advantages[2 * group : 2 * group + 2] = 0.0
    if credit == "field":
        advantages = advantages.unsqueeze(1) * (torch.arange(made.completion_ids.shape[1]) % 2)
    return GRPOBatch(made, advantages, made.mask, loss_counts(made.mask, 9))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("credit", ["whole", "field"])
@pytest.mark.parametrize("dull", [[], [0], [1, 3, 4], [0, 1, 2, 3, 4]], ids=["none", "one", "most", "all"])
def test_dull_groups_change_no_gradient(load, loss_type, credit, dull):
    settings = LossSettings(loss_type=loss_type, kl_coef=0.0)
    model = load("gpt2", "fp64").model

    def gradient(batch: GRPOBatch) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        sums = accumulate_grpo(model, batch, settings=settings, temperature=1.0, dtype=torch.float64, rows=4)
        assert finish_grpo([sums], batch.counts)["entropy"] > 0
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole = batch_of(dull=dull, credit=credit)
    fewer = whole.without_dull_groups()
    assert len(fewer.rollout.prompts) == max(1, 5 - len(dull)) and fewer.counts is whole.counts
    expected = gradient(whole)
    assert torch.linalg.norm(gradient(fewer) - expected) <= 1e-12 * max(1.0, torch.linalg.norm(expected))


def test_a_run_learns_from_the_groups_that_differ_where_there_is_no_kl(config, made_up_plans, monkeypatch):
    """With a KL all rows have a gradient."""
    rows = []
    real = GRPOBatch.without_dull_groups

    def counted(batch: GRPOBatch) -> GRPOBatch:
        rows.append(len(batch.rollout.prompts))
        return real(batch)

    monkeypatch.setattr(GRPOBatch, "without_dull_groups", counted)
    config = dataclasses.replace(config, steps=1, eval_interval=0, credit="field")

    def train(**changes) -> dict:
        with open_run(dataclasses.replace(config, **changes)) as run:
            Trainer(run, Console(quiet=True)).train(StopRequest())
            return read_lines(run.folder / METRICS_FILE)[0]

    assert train(name="kl")["skipped"] == 0
    assert rows == []
    line = train(name="free", loss=dataclasses.replace(config.loss, kl_coef=0.0))
    assert rows == [2] and line["skipped"] == 0 and line["entropy"] > 0


def test_credit_by_fields_wants_ratios_of_tokens(config):
    sequence = dataclasses.replace(config.loss, importance_level="sequence")
    with pytest.raises(SettingsError, match="credit is field, but importance_level is sequence"):
        dataclasses.replace(config, credit="field", loss=sequence)
