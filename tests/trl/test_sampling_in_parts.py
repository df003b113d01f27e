"""Completions are sampled whole groups at a time, and a part that ran out of memory begins again."""

import pytest
import torch
import trl
from benchmarks.trl_cases import GROUP, GROUPS, LENGTH, Case, make, rows_at_once

from grpo.trl import GRPOTrainer
from grpo.trl.parts import fields_by_row

pytestmark = pytest.mark.usefixtures("own_accelerator")
PROMPTS = [[1 + i // GROUP] * (1 + i // GROUP) for i in range(GROUPS * GROUP)]


@pytest.fixture
def trainer():
    return make(GRPOTrainer, Case())


def sampled(trainer, seed: int = 0, **options):
    torch.manual_seed(seed)
    ids, logprobs = trainer._generate_single_turn(PROMPTS, None, options, GROUP)
    assert logprobs is None
    return ids


def spied(monkeypatch, fail_at: int | None = None):
    """Let TRL's own generation note the prompts it is given, and fail once, half-way through a call."""
    calls = []
    generate = trl.GRPOTrainer._generate_single_turn

    def spy(self, prompt_ids, *rest, **named):
        calls.append(prompt_ids)
        if len(calls) == fail_at:
            generate(self, prompt_ids, *rest, **named)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(self, prompt_ids, *rest, **named)

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", spy)
    return calls


def test_parts_are_whole_groups_in_their_order_and_grow(trainer, monkeypatch):
    calls = spied(monkeypatch)
    ids = sampled(trainer)
    assert len(ids) == len(PROMPTS) and all(1 <= len(each) <= LENGTH for each in ids)
    assert [row for call in calls for row in call] == PROMPTS
    assert [len(call) for call in calls] == [GROUP, 2 * GROUP, 3 * GROUP]  # one, twice that, what is left
    calls.clear()
    sampled(trainer)
    assert [len(call) for call in calls] == [GROUPS * GROUP]


def test_a_part_that_is_done_again_with_as_many_rows_is_the_same(trainer, monkeypatch):
    rows_at_once(2 * GROUP)(trainer)
    expected = sampled(trainer)
    calls = spied(monkeypatch, fail_at=2)
    assert sampled(trainer) == expected and len(calls) == 4
    assert sampled(trainer, seed=1) != expected


def test_one_that_does_not_fit_is_done_with_fewer(trainer, monkeypatch):
    rows_at_once(4 * GROUP)(trainer)
    sizes = []

    def generate(self, prompt_ids, *rest, **named):
        sizes.append(len(prompt_ids))
        if len(prompt_ids) > GROUP:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [[1]] * len(prompt_ids), None

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", generate)
    assert len(sampled(trainer)) == len(PROMPTS)
    assert sizes[:4] == [16, 16, 8, 4]


@pytest.mark.parametrize("setting", ["use_vllm", "use_transformers_continuous_batching"])
def test_who_minds_memory_itself_is_asked_once(trainer, monkeypatch, setting):
    asked = []
    monkeypatch.setattr(trainer, setting, True)
    monkeypatch.setattr(
        trl.GRPOTrainer, "_generate_single_turn",
        lambda self, prompt_ids, *rest: asked.append(len(prompt_ids)) or ([[1]] * len(prompt_ids), [[0.0]]),
    )  # fmt: skip
    ids, logprobs = trainer._generate_single_turn(PROMPTS, None, {}, GROUP)
    assert asked == [len(PROMPTS)] and logprobs == [[0.0]] and len(ids) == len(PROMPTS)


def test_scores_are_the_same_however_many_rows(trainer):
    ids = torch.randint(1, 8, (GROUPS * GROUP, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        whole, *_ = trl.GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, 5)
        for rows in (1, GROUP, 5):
            rows_at_once(rows)(trainer)
            given = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 5, batch_size=24)
            assert torch.allclose(given[0], whole, atol=1e-12)
    assert {each.rows for each in trainer.fit.take_passes()} == {1, GROUP, 5}


class TestFieldsOfImages:
    """Three rows, of two, no and one image."""

    images = ["a", "b"], None, ["c"]

    def test_by_a_grid_of_patches(self):
        grid = torch.tensor([[1, 2, 2], [1, 1, 2], [1, 2, 1]])
        fields = {
            "pixel_values": torch.arange(8.0).view(8, 1),
            "image_grid_thw": grid,
            "mm_token_type_ids": [[1], [0], [1]],
        }
        some = fields_by_row(fields, self.images, 3)
        first, rest = some(slice(0, 1)), some(slice(1, 3))
        assert first["pixel_values"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
        assert rest["pixel_values"].flatten().tolist() == [6, 7]
        assert rest["image_grid_thw"].tolist() == [[1, 2, 1]] and rest["mm_token_type_ids"] == [[0], [1]]
        assert "num_images" not in first

    def test_an_image_or_a_row_at_a_time(self):
        flat = fields_by_row({"pixel_values": torch.arange(3.0).view(3, 1)}, self.images, 3)
        assert flat(slice(2, 3))["pixel_values"].flatten().tolist() == [2]
        padded = fields_by_row({"pixel_values": torch.zeros(4, 2, 1)}, [["a"], ["b"], [], ["c", "d"]], 4)
        assert padded is not None

    def test_none_where_it_is_not_known(self):
        tiles = {"pixel_values": torch.zeros(7, 1), "spatial_shapes": torch.zeros(7, 2)}
        assert fields_by_row(tiles, self.images, 3) is None
        assert fields_by_row({"pixel_values": torch.zeros(7, 1)}, self.images, 3) is None
        assert fields_by_row({}, None, 3)(slice(0, 1)) == {}
