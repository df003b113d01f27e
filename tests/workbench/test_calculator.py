"""The calculator: its lines and batches worked out by hand, its profiles, its errors."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from commands import run
from rich.console import Console

from grpo.config import SettingsError, parse_command_line
from grpo.memory.budget import CONTEXT_BYTES, GB
from grpo.workbench.calculator.calculate import Calculation, calculate, idle_sentences
from grpo.workbench.calculator.cards import CARDS, Card, card_of_size, find_card
from grpo.workbench.calculator.profiles import write_profiles
from grpo.workbench.calculator.settings import CalculatorSettings
from grpo.workbench.calculator.tables import as_json, notes, show
from grpo.workbench.models import num_parameters
from grpo.workbench.predict import StepMemory, StepSettings
from grpo.workbench.spec import ModelSpec

CALCULATE = "scripts/calculate_batch_size.py"
COUNTS = {"gpu": "h100", "frozen": (8e9, 7e9), "trainable": 1e8}
TINY = ModelSpec(arch="gpt2", layers=1, width=32, heads=2, context=64)


def calculated(**settings) -> Calculation:
    wanted = CalculatorSettings(**settings)
    return calculate(wanted, wanted.card())


def shown(found: Calculation) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    show(found, console)
    return " ".join(console.export_text().split())


# -------------------------------------------------------------------------------------------- cards


def test_the_default_model_needs_no_hub_and_without_one_it_is_said_which(monkeypatch, logged):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("grpo.model.hub._answers", lambda name: False)
    assert num_parameters(ModelSpec(model="jrahn/RookWorld-LM-124M").config()) == 124_439_808
    assert any("built-in shape of jrahn/RookWorld-LM-124M" in line for line in logged)
    named = calculated(gpu="rtx4090", model=TINY, max_batch_size=8, prompt_tokens=20, max_new_tokens=20)
    nameless = dataclasses.replace(named, settings=dataclasses.replace(named.settings, model=ModelSpec()))
    assert "no model is named: --model or --arch" in shown(nameless)
    assert "no model is named" not in shown(named)


def test_a_card_is_found_however_it_is_written():
    assert find_card("H100") is find_card("h100") is CARDS["h100"]
    assert find_card("RTX 4090").sold_gb == find_card("rtx-4090").sold_gb == 24
    assert find_card("a100_80gb") is CARDS["a100-80gb"]
    assert {8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192} <= {card.sold_gb for card in CARDS.values()}


@pytest.mark.parametrize(
    ("typed", "near"),
    [("h10", "Did you mean h100?"), ("a100", "Did you mean a100-40gb or a100-80gb?"), ("rtx4091", "rtx4090")],
)
def test_a_card_that_is_none_suggests_near_ones(typed, near):
    with pytest.raises(SettingsError, match=f"gpu is '{typed}'") as error:
        find_card(typed)
    assert near in str(error.value) and "--gpu-memory" in str(error.value)


def test_usable_bytes_are_less_than_sold_and_less_again_under_ecc():
    assert CARDS["h100"].usable_bytes == pytest.approx(0.98 * 80 * GB, abs=1)
    assert CARDS["l40s"].usable_bytes == pytest.approx(0.98 * 15 / 16 * 48 * GB, abs=1)  # 44.1 GB
    assert not CARDS["t4"].bf16 and not CARDS["v100-16gb"].bf16 and CARDS["a10"].bf16
    assert card_of_size("20GB") == Card("20gb", 20)
    with pytest.raises(SettingsError, match="gpu_memory is 'big', which is no size: write it like 24GB"):
        card_of_size("big")


# ----------------------------------------------------------------------------------- counts of parameters


def test_the_lines_of_the_published_h100_budget_follow_from_its_counts():
    """30 GB of frozen weights, 1.2 of optimizer, 0.2 of gradients, 8 % overhead, 42 of 80 left (10**9)."""
    found = calculated(**COUNTS)
    held = {line.name: line.bytes for line in found.demand.lines}
    assert held["frozen, 8 + 7 B"] == 30e9
    assert held["trainable, 0.1 B"] == held["gradients"] == pytest.approx(0.2e9)
    assert held["optimizer"] == pytest.approx(1.2e9)
    assert held["overhead"] == pytest.approx(0.08 * 78.4 * GB)
    assert found.demand.fixed_bytes == pytest.approx(31.6e9 + 0.08 * 78.4 * GB)
    text = shown(found)
    assert "│ card │ 78.40 │ 80.00 │" in text
    assert "│ frozen, 8 + 7 B │ 27.94 │ 30.00 │" in text  # 30e9 / 2**30
    assert "│ optimizer │ 1.12 │ 1.20 │" in text
    assert "│ overhead │ 6.27 │ 6.40 │" in text
    assert "│ remains │ 42.70 │ 42.00 │" in text  # 80 - 30 - 0.2 - 1.2 - 0.2 - 6.4


def test_counts_alone_tell_no_batch_and_none_is_guessed():
    found = calculated(**COUNTS)
    assert [row.batch_size for row in found.rows] == [None] * 3 and found.totals() == {}
    assert "no batch follows" in notes(found)[0] and "--sample-memory" in notes(found)[0]
    with pytest.raises(SettingsError, match=r"yaml is .* no batch of whole groups of 8 is known"):
        write_profiles(found, Path("p.yaml"))


def test_bytes_a_parameter_of_each_layout():
    def sizes(**layout):
        lines = calculated(**{**COUNTS, "trainable": 1e9}, **layout).demand.lines
        return [line.bytes / 1e9 for line in lines[1:4]]

    assert sizes(weights="fp32") == [4, 8, 4]
    assert sizes(weights="bf16", optimizer="adamw-8bit") == [2, 2, 2]
    assert sizes(optimizer="sgd") == [2, 4, 2]  # the copy in fp32 alone
    assert calculated(**COUNTS, frozen_dtype="int4").demand.lines[0].bytes == 7.5e9


def test_batches_of_samples_of_a_known_size():
    """At 85 %: 66.64 - 27.94 - 1.49 - 6.27 = 30.94 GB, of 0.44 GB each."""
    found = calculated(**COUNTS, sample_memory="450.56MB", batch_size=20, gpus=3, accumulate=2)
    assert [row.batch_size for row in found.rows] == [61, 70, 79]
    assert found.totals() == {1: 140, 2: 280, 3: 420, 4: 560, 8: 1120}
    assert found.use.bytes == pytest.approx(found.demand.fixed_bytes + 20 * 0.44 * GB)
    assert "│ 85% │ 66.64 │ 30.94 │ 70 │ 140 │ 280 │ 420 │" in shown(found)


def test_a_measured_batch_gives_bytes_a_sample():
    """37 % of 78.4 GB is 29.008; without frozen models 7.76 are fixed (1.49 + 6.27)."""
    found = calculated(gpu="h100", trainable=1e8, batch_size=20, measured_share=0.37)
    fixed = 1.6e9 + 0.08 * 78.4 * GB
    sample = (0.37 * 78.4 * GB - fixed) / 20
    assert found.row.batch_size == int((0.85 * 78.4 * GB - fixed) / sample) == 55
    assert idle_sentences(found) == ["Batch 20 holds 29.01 GB, 37% (measured): 49.39 GB of 78.40 lie idle."]


def test_a_measured_batch_below_the_lines_is_said_and_gives_no_batch():
    found = calculated(**COUNTS, batch_size=20, measured_share=0.37)
    assert found.demand.samples is None and found.use.measured
    idle, contradiction = idle_sentences(found)
    assert "49.39 GB of 78.40 lie idle" in idle
    assert "come to 35.70 GB without any sample" in contradiction


def test_profiles_are_settings_that_training_reads(tmp_path):
    """70 samples fit: 64 in whole groups of 8."""
    file = tmp_path / "p.yaml"
    found = calculated(**COUNTS, sample_memory="450.56MB", gpus=3, max_new_tokens=20, kl=False)
    names = ["h100_single", "h100_dual", "h100_x3", "h100_quad", "h100_octo"]
    assert write_profiles(found, file) == names
    for name, count in zip(names, (1, 2, 3, 4, 8), strict=True):
        config = parse_command_line(["--config", str(file), "--profile", name])
        assert config.batch_size == count * 64
        assert (config.memory_utilization, config.sampling.max_new_tokens) == (0.85, 20)
        assert config.loss.kl_coef == 0
    assert config.model == "auto" and "--model FOLDER" in file.read_text()  # counts have no name


# ---------------------------------------------------------------------------------------- with a model


@pytest.fixture(scope="module")
def tiny() -> Calculation:
    """Four GB, a frozen model of half a billion parameters beside the tiny one."""
    return calculated(
        model=TINY, objective="lm", gpu_memory="4GB", frozen=(0.5e9,), memory_utilization=0.6, batch_size=13
    )


def test_with_adapters_the_base_is_frozen_and_the_reference_free():
    found = calculated(model=TINY, gpu_memory="4GB", lora_rank=4, max_new_tokens=16, prompt_tokens=16)
    held = {line.name: line for line in found.demand.lines}
    trained = 4 * (32 + 3 * 32)  # A and B of the one c_attn
    assert held["frozen base and adapters"].bytes == 2 * num_parameters(TINY.config()) + 4 * trained
    assert held["optimizer"].bytes == 8 * trained and held["gradients"].bytes == 4 * trained
    assert held["optimizer"].detail == "8 bytes a trained parameter"
    assert "frozen reference" not in held
    assert held["sampler's copy"].bytes == 2 * TINY.config().vocab_size * 32  # of the head alone, centred


def test_a_base_in_4_bits_leaves_more_room_and_is_in_the_profiles(tmp_path):
    small = {"prompt_tokens": 16, "max_new_tokens": 16, "gpu_memory": "4GB", "lora_rank": 4}
    model = ModelSpec(arch="llama", layers=1, width=128, heads=2, context=64)
    plain, packed = (calculated(model=model, load_in_4bit=in_4bit, **small) for in_4bit in (False, True))
    held = {line.name: line.bytes for line in packed.demand.lines}
    base = {line.name: line.bytes for line in plain.demand.lines}["frozen base and adapters"]
    assert held["frozen base in 4 bits and adapters"] < base
    assert packed.demand.fixed_bytes < plain.demand.fixed_bytes
    write_profiles(packed, tmp_path / "p.yaml")
    assert "load_in_4bit: true" in (tmp_path / "p.yaml").read_text()
    with pytest.raises(ValueError, match="load_in_4bit is True, but lora_rank is 0: add --lora-rank 16"):
        CalculatorSettings(model=model, load_in_4bit=True)


def test_a_models_budget_is_the_predictors(tiny):
    step = StepSettings("lm", TINY.config(), torch.bfloat16, new_tokens=64, device_type="cuda")
    memory = StepMemory(step, overhead_bytes=CONTEXT_BYTES)
    count = num_parameters(TINY.config())
    held = {line.name: line.bytes for line in tiny.demand.lines}
    assert held == {
        "frozen, 0.5 B": 1e9, "trainable weights": 4 * count, "optimizer": 8 * count,
        "gradients": 4 * count, "overhead": CONTEXT_BYTES,
    }  # fmt: skip
    assert [row.share for row in tiny.rows] == [0.6, 0.8, 0.85, 0.9] and tiny.row.share == 0.6
    for row in tiny.rows:
        room = row.share * 0.98 * 4 * GB - 1e9
        needed = memory.largest_phase(row.batch_size)[1].upper_bytes
        assert needed <= room < memory.largest_phase(row.batch_size + 1)[1].upper_bytes
        assert row.peak.bytes + row.peak.error_bytes == pytest.approx(needed + 1e9)
    assert tiny.use.bytes == pytest.approx(1e9 + memory.largest_phase(13)[1].peak_bytes)


def test_what_is_printed_and_written_of_a_model(tiny):
    text = shown(tiny)
    assert "gpt2 1 x 32, vocabulary 256, lm, bf16" in text
    assert "│ learn │" in text and "±5% of what a phase adds" in text
    assert "10**9" not in text
    stored = json.loads(json.dumps(as_json(tiny)))
    assert stored["card"]["usable_bytes"] == tiny.card.usable_bytes
    assert stored["totals"]["4"] == 4 * tiny.row.batch_size
    assert stored["fixed_bytes"] + stored["remaining_bytes"] == pytest.approx(tiny.card.usable_bytes)


def test_a_card_without_bf16_computes_in_fp32(tiny):
    old = dataclasses.replace(tiny, card=CARDS["t4"], precision="fp32")
    assert notes(old)[-1] == "t4 has no native bf16: this is for fp32."


# ---------------------------------------------------------------------------------------- wrong settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: give at least 1"),
        ({"batch_size": 20}, "batch_size is 20, .* group_size 8: give 16 or 24, or another --group-size"),
        ({"batch_size": 4}, "batch_size is 4, .* give 8, or"),
        ({"group_size": 0, "batch_size": 8}, "group_size is 0: give at least 2"),
        ({"gpus": 0}, "gpus is 0: give at least 1"),
        ({"max_batch_size": 7}, "max_batch_size is 7, less than one group of 8"),
        ({"memory_utilization": 1.5}, "memory_utilization is 1.5: give a share above 0 and up to 1"),
        ({"memory_utilization": 0.0}, "memory_utilization is 0.0: give a share"),
        ({"overhead_share": 1.0}, "overhead_share is 1.0: give a share from 0 to below 1"),
        ({"frozen": (0.0,)}, "frozen is 0: give a number of parameters, such as 8e9"),
        ({"trainable": -1.0}, "trainable is -1: give a number"),
        ({"gpu": "h100", "gpu_memory": "8GB"}, "gpu is 'h100' and gpu_memory '8GB': give one"),
        ({"trainable": 1e8, "model": TINY}, "trainable is 1e[+]08, and there is a model, gpt2: give one"),
        ({"optimizer": "sgd"}, "optimizer is sgd, but a model's memory is predicted: leave it out, or"),
        ({"trainable": 1e8, "precision": "fp32"}, "precision is fp32, .*: leave it out"),
        ({"trainable": 1e8, "measured_share": 0.3}, "measured_share is 0.3, of which batch"),
        ({"claim": ("69@85%",)}, "claim is 69@85% alone: give another"),
        ({"yaml": Path("p.yaml"), "objective": "lm"}, "yaml is p.yaml, .*leave out --objective lm"),
        ({"json": Path("nowhere/p.json")}, "json is nowhere/p.json: there is no folder nowhere"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_a_remedy(settings, message):
    with pytest.raises(SettingsError, match=message):
        CalculatorSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**COUNTS, "frozen": (8e9, 70e9)},
            "frozen is 8 B and 70 B in bf16: .*145.29 GB.* h100 offers 78.40",
        ),
        ({"gpu": "h100", "trainable": 10e9}, "trainable is 10 B: .*optimizer: 111.76 GB.*a smaller one"),
        (
            {"gpu_memory": "100MB", "model": TINY},
            "model is gpt2 1 x 32.*overhead: 0.50 GB.* 100mb offers 98 MB",
        ),
        ({"gpu": "h100", "model": TINY, "max_new_tokens": 60}, "60 and 60, but the model reaches 64 tokens"),
        ({**COUNTS, "sample_memory": "much"}, "sample_memory is 'much' is no size"),
    ],
)
def test_what_does_not_fit_the_card_or_the_model_is_said_before_anything_is_traced(
    settings, message, monkeypatch
):
    monkeypatch.setattr("grpo.workbench.calculator.calculate.demand_of_model", None)
    with pytest.raises(SettingsError, match=message):
        calculated(**settings)


# ------------------------------------------------------------------------------------------- commands


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_the_published_budget_as_it_is_typed_and_profiles_that_do_not_follow(tmp_path):
    arguments = "--gpu h100 --frozen 8e9 --frozen 7e9 --trainable 1e8 --claim 69@85% --claim 64@80%"
    done = run(CALCULATE, *f"{arguments} --yaml p.yaml".split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    printed, error = words(done.stdout), words(done.stderr)
    assert "remains 42.70 42.00" in printed
    assert "so 60 fit at 80 %, claimed are 64" in printed  # 27.02 GB of 0.4484
    assert "They do not follow from one another." in printed
    assert error.startswith("error yaml is p.yaml, but no batch of whole groups of 8 is known to fit h100")
    assert not (tmp_path / "p.yaml").exists()


def test_the_bundled_model_on_a_card_as_it_is_typed(tmp_path):
    arguments = "--gpu rtx4090 --prompt-tokens 16 --max-new-tokens 16 --no-kl --batch-size 64"
    done = run(CALCULATE, *f"{arguments} --yaml p.yaml --json p.json".split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = words(done.stdout)
    assert "rook-tiny, grpo, bf16, 16 + 16 tokens, groups of 8" in printed and "lie idle" in printed
    stored = json.loads((tmp_path / "p.json").read_text())
    held = {line["name"]: line["bytes"] for line in stored["lines"]}
    weights = held["trainable weights"]
    assert (held["optimizer"], held["gradients"]) == (2 * weights, weights)
    assert held["sampler's copy"] == weights / 2 + 2 * 902 * 256  # a head of its own
    size = stored["shares"][1]["batch_size"]
    assert size > 0 and size % 8 == 0
    config = parse_command_line(["--config", str(tmp_path / "p.yaml"), "--profile", "rtx4090_dual"])
    assert (config.model, config.batch_size, config.precision) == ("rook-tiny", 2 * size, "bf16")
    assert config.loss.kl_coef == 0
