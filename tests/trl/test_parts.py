"""A batch's parts: its rows once each, without columns that only pad, and what each counts."""

import math

import pytest
import torch

from grpo.trl.parts import LOSSES, Part, completion_lengths, merged, parts

LENGTHS = [3, 7, 0, 5, 7, 1]
P, C = 4, 8


def batch() -> dict:
    mask = (torch.arange(C) < torch.tensor(LENGTHS)[:, None]).int()
    ids = torch.arange(6)[:, None] * 10 + torch.arange(C)
    return {
        "prompt_ids": torch.arange(6)[:, None].expand(6, P), "prompt_mask": torch.ones(6, P).int(),
        "completion_ids": ids, "completion_mask": mask, "advantages": torch.arange(6.0),
        "num_items_in_batch": mask.sum(), "old_per_token_logps": ids.double(),
        "importance_sampling_ratio": torch.arange(6.0)[:, None], "token_type_ids": torch.zeros(6, P + C),
        "ref_per_token_logps": None,
    }  # fmt: skip


def test_rows_are_there_once_the_longest_first():
    made = list(parts(batch(), 4))
    assert [part["advantages"].tolist() for part in made] == [[1, 4, 3, 0], [5, 2]]
    assert [part.is_last for part in made] == [False, True]
    assert [(part.rows, part.tokens) for part in made] == [(4, 22), (2, 1)]
    assert made[0].weight("grpo") == 4 / 6 and made[0].weight("bnpo") == 22 / 23
    assert {part.weight("dapo") for part in made} == {1.0}
    assert sum(part.weight(loss) for part in made for loss in ("grpo", "bnpo")) == pytest.approx(2)


def test_columns_that_only_pad_are_left_out():
    long, short = parts(batch(), 4)
    assert long["completion_ids"].shape == (4, 7) and short["completion_ids"].shape == (2, 2)
    assert short["completion_ids"].tolist() == [
        [50, 51],
        [20, 21],
    ]  # two at least: one is a number a row to TRL
    assert short["old_per_token_logps"].shape == (2, 2) and short["token_type_ids"].shape == (2, P + 2)
    assert short["importance_sampling_ratio"].shape == (2, 1) and short["prompt_ids"].shape == (2, P)
    assert short["num_items_in_batch"].item() == 23 and short["ref_per_token_logps"] is None
    (_, padded) = parts(batch(), 4, multiple=4)
    assert padded["completion_ids"].shape == (2, 4)
    assert completion_lengths(batch()).tolist() == LENGTHS


def test_what_a_tool_said_counts_for_its_length_but_not_as_a_token():
    inputs = batch() | {"tool_mask": torch.ones(6, C).int()}
    inputs["tool_mask"][1, 2:5] = 0
    (whole,) = parts(inputs, 6)
    assert whole.tokens == sum(LENGTHS) - 3 and whole["completion_ids"].shape[1] == 7


@pytest.mark.parametrize("kind", ["grid", "flat", "a row each"])
def test_images_go_with_their_rows(kind):
    images = [1, 0, 2, 1, 0, 1]
    pixels = {
        "grid": {
            "pixel_values": torch.tensor([0.0, 0, 20, 21, 21, 30, 50])[:, None],
            "image_grid_thw": torch.tensor([[1, 2, 1], [1, 1, 1], [1, 2, 1], [1, 1, 1], [1, 1, 1]]),
        },
        "flat": {"pixel_values": torch.tensor([0.0, 20, 21, 30, 50])[:, None]},
        "a row each": {"pixel_values": torch.arange(6.0)[:, None]},
    }[kind]  # fmt: skip
    made = list(parts(batch() | pixels | {"num_images": images}, 2))
    assert [part.get("num_images", [0, 0]) for part in made] == [[0, 0], [1, 1], [1, 2]]
    found = [part["pixel_values"].flatten().tolist() if "pixel_values" in part else None for part in made]
    assert found == {
        "grid": [None, [30, 0, 0], [50, 20, 21, 21]], "flat": [None, [30, 0], [50, 20, 21]],
        "a row each": [[1, 4], [3, 0], [5, 2]],
    }[kind]  # fmt: skip


def test_metrics_do_not_depend_on_the_parts():
    def part(rows: int, tokens: int, **metrics: float) -> Part:
        made = Part(
            {"completion_ids": torch.zeros(rows, 3)}, rows=rows, tokens=tokens, of_rows=4, of_tokens=10
        )
        for name, value in metrics.items():
            made.metrics[name.replace("__", "/")].append(value)
        return made

    both = [
        part(3, 4, kl=1.0, policy_loss=2.0, clip__low_min=0.5, clip__high_max=math.nan, vespo__phi=1.0),
        part(1, 6, kl=2.0, policy_loss=4.0, clip__low_min=0.2, clip__high_max=math.nan, vespo__phi=5.0),
    ]
    together = merged(both, loss_type="grpo", by_sequence=False)
    assert together["kl"] == (16.0, 10.0) and together["policy_loss"] == (2.5, 1.0)
    assert together["clip/low_min"] == (0.2, 0.0) and math.isnan(together["clip/high_max"][0])
    assert together["vespo/phi"] == (8.0, 4.0)
    assert merged(both, loss_type="dapo", by_sequence=True)["policy_loss"] == (6.0, 1.0)
    assert merged(both, loss_type="bnpo", by_sequence=True)["kl"] == (16.0, 10.0)
    assert len(LOSSES) == 8
