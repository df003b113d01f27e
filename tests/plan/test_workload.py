"""Bytes that a run is to hold, in closed form, by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from conftest import ARCHITECTURES
from prompt_lines import source_of
from torch import nn
from transformers import GPT2Config

from grpo.config import Config
from grpo.memory import PassSize
from grpo.model.target import Target, is_same_device
from grpo.plan.phase_probe import PhaseProbe, kv_bytes_per_token
from grpo.plan.trace import TracedPhases
from grpo.plan.workload import Workload, longest_prompt
from grpo.run import dry_run

VOCABULARY, G, MIB = 100, 8, 2**20
BF16, FP32 = torch.bfloat16, torch.float32
WITHOUT_KL = {"kl_coef": 0.0}


def workload(dtype: torch.dtype = FP32, name: str = "gpt2", **settings: object) -> Workload:
    usual = {"batch_size": 64, "group_size": G, "max_new_tokens": 20}
    config = Config(**{**usual, **settings})  # type: ignore[arg-type]
    target = Target(ARCHITECTURES[name](VOCABULARY).config, torch.device("cpu"), dtype, "sdpa")
    return Workload(config, target, 50)


class Layers(nn.Module):
    """Linear layers of so many trained numbers each, and an embedding of as many bytes that are not."""

    def __init__(self, sizes: Sequence[int], frozen_bytes: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, 1, bias=False, dtype=dtype) for size in sizes])
        self.base = nn.Parameter(torch.empty(frozen_bytes, dtype=torch.uint8), requires_grad=False)

    def get_output_embeddings(self) -> None:
        """It has none."""


def phases_of(
    work: Workload, sizes: Sequence[int] = (1000,), frozen_bytes: int = 0, copied: int = 0
) -> PhaseProbe:
    """Phases of a policy of `Layers`, whose sampler has so many numbers in bf16 of its own."""
    model = Layers(sizes, frozen_bytes, work.target.master_dtype)
    sampler = nn.ParameterList([*model.parameters(), nn.Parameter(torch.empty(copied, dtype=BF16))])
    return PhaseProbe(work, model, sampler)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.float64, WITHOUT_KL, {"weights": 8, "optimizer": 16}),
        # The weights of products are in bf16 where nothing is trained.
        (BF16, {}, {"weights": 4, "optimizer": 8, "reference": 2, "sampler's copy": 2}),
    ],
)
def test_what_exists_all_along_in_bytes_a_parameter(dtype, settings, expected):
    work, copied = workload(dtype, **settings), 1000 * (dtype == BF16)
    bytes_of = {name: 1000 * size for name, size in expected.items()}
    assert phases_of(work, copied=copied).resident() == bytes_of
    bytes_of.pop("reference", None)
    assert phases_of(replace(work, reference_here=False), copied=copied).resident() == bytes_of

    # With adapters the base is there once: 1000 bytes of it, and 50 numbers of adapters in two tensors.
    work = workload(dtype, lora_rank=2, reference_sync=5 * (dtype == BF16))
    size = work.target.master_dtype.itemsize
    adapters = {"weights": 1000 + size * 50, "optimizer": 2 * size * 50}
    if dtype == BF16:  # the sampler has a head of its own, a reference that follows its adapters
        adapters |= {"reference": 4 * 50, "sampler's copy": 2 * 300}
    assert phases_of(work, [20, 30], 1000, copied=300 * (dtype == BF16)).resident() == adapters


def test_of_a_sharded_model_each_process_holds_its_part_and_gathers_what_it_samples_with():
    work = replace(workload(BF16, shard=True), processes=4)
    phases = phases_of(work, [1001])  # which samples with what it gathers
    assert phases.resident() == {"weights": 1001, "optimizer": 8 * 251, "reference": 1001}
    assert phases.known_parts("learn", PassSize(8, 20, 50))["gradients"] == 4 * 251
    whole = replace(workload(BF16), processes=4)
    assert whole.shards == 1 and phases_of(whole).resident()["weights"] == 4000


def test_moments_in_8_bits_are_a_quarter():
    """1000 numbers are too few; 10 000 have 40 blocks of a scale each, and two code books of 256."""
    work = workload(optimizer_kind="adamw8bit")
    moments = phases_of(work, [1000, 10_000]).resident()["optimizer"]
    assert moments == 8 * 1000 + 2 * (10_000 + 4 * 40) + 2 * 4 * 256


def test_keys_and_values_of_a_token():
    """2 · layers · heads that have keys · their width · bytes."""
    for name, heads, width, dtype in ("gpt2", 2, 16, FP32), ("llama", 2, 8, FP32), ("qwen", 1, 16, BF16):
        model = ARCHITECTURES[name](VOCABULARY).config
        assert kv_bytes_per_token(model, dtype) == 2 * 2 * heads * width * dtype.itemsize


def test_of_what_a_phase_adds_a_part_has_a_closed_form():
    phases, size = phases_of(workload(), [300]), PassSize(16, 20, 50)
    cache = (2 * 50 + 16 * 24) * 256 * 2  # a page has a multiple of 8 tokens
    assert phases.known_parts("sample", size) == {"KV cache": cache, "logits": 16 * VOCABULARY * 8}
    assert phases.known_parts("score", size) == {"logits": 16 * 20 * VOCABULARY * 8}
    expected = {"logits": 16 * 20 * VOCABULARY * 12, "gradients": 4 * 300}
    assert phases.known_parts("learn", size) == expected
    # More tokens than the head takes at once.
    assert phases.known_parts("learn", PassSize(64, 20, 50))["logits"] == 1024 * VOCABULARY * 12


def test_on_cuda_tensors_have_blocks():
    """As its allocator makes them; without segments that grow, a MiB that is left is not cut off."""

    def blocks(grows: bool, *sizes: int) -> list[int]:
        target = Target(GPT2Config(), torch.device("cuda"), FP32, "sdpa", grows)
        return [target.block_bytes(size) for size in sizes]

    assert blocks(True, 1, 513, 11 * MIB + 1) == [512, 1024, 11 * MIB + 512]
    assert blocks(False, 1, 513, 9 * MIB + 1) == [512, 1024, 9 * MIB + 512]
    assert blocks(False, 11 * MIB, 11 * MIB - 512) == [12 * MIB, 11 * MIB - 512]
    assert workload().target.block_bytes(513) == 513


def test_what_settings_say_of_rows_and_of_what_is_scored():
    work = workload(rollout_rows=32, train_rows=4)
    assert work.fixed_rows == {"sample": 32, "learn": 4} and work.size(3) == PassSize(3, 20, 50)
    assert [replace(work, processes=count).rows_here for count in (1, 3, 8)] == [64, 24, 8]
    auto = workload(batch_size="auto", max_batch_size=150)
    assert (auto.rows_here, replace(auto, processes=2).rows_here) == (144, 72)
    adapters = {"lora_rank": 2, "reference_sync": 5}
    for settings, scored in (
        ({}, "reference"),
        (WITHOUT_KL, "nothing"),
        ({"num_iterations": 2, **WITHOUT_KL}, "policy"),
        (adapters, "policy"),
    ):
        made = workload(**settings)
        assert made.scores == scored and ("score" in made.phases) == (scored != "nothing")


def test_the_longest_prompt_is_the_one_of_most_tokens_of_all_lanes(tokenizer):
    """Not always the one of most characters."""
    words, digits = "e" * 90, " ".join("1234567890" * 4)
    source = source_of(policy=[words, "a"], environment=[digits, "b"])
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (words, digits)]
    assert longest_prompt(source, tokenizer) == max(counts)


@pytest.mark.parametrize(
    ("name", "device", "is_same"),
    [
        (None, "cuda", True),
        ("cuda", "cuda", True),
        ("cuda:0", "cuda", True),
        ("cuda", "cuda:0", True),
        ("cuda:1", "cuda", False),
        ("cuda:1", "cuda:1", True),
        ("cpu", "cuda", False),
        ("cpu", "cpu", True),
        ("auto", "cuda", True),
        ("auto", "cpu", True),
    ],
)
def test_a_reference_beside_the_policy_is_counted_by_whatever_name_its_device_has(name, device, is_same):
    assert is_same_device(name, torch.device(device)) == is_same


def test_a_dry_run_counts_a_reference_on_the_card_that_is_named_with_its_number(config):
    """A card that is not there has no other."""
    held = [
        sum(
            TracedPhases(dry_run.workload(each, torch.device("cuda"), absent="8GB"))
            .phases.resident()
            .values()
        )
        for each in (
            replace(config, kl_coef=0.1, reference_device=name) for name in (None, "cuda:0", "cuda", "cpu")
        )
    ]
    assert held[0] == held[1] == held[2] > held[3]
    with pytest.raises(ValueError, match="device is 'warp-drive'"):
        dry_run.workload(replace(config, reference_device="warp-drive"), torch.device("cuda"), absent="8GB")
