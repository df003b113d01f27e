"""The largest batch: by trials, on a line through peaks, for a card that is not there; and rates here."""

import dataclasses
import json
import shlex
import sys

import pytest
import torch
from commands import ROOT, here, run
from conftest import untraced
from forked import forked_workers

from grpo.config import Config, parse_command_line
from grpo.logs.tables import table
from grpo.memory.budget import CONTEXT_BYTES, GB
from grpo.model.load import load_tokenizer, shape_of
from grpo.plan.trace import TracedPhases
from grpo.run.loading import load_source
from grpo.workbench import find_max, findings, line
from grpo.workbench.calculate import Model, budget_rows, calculate, share_rows, write_profiles
from grpo.workbench.cards import CARDS, Card, find_card
from grpo.workbench.check import switches, training_rates
from grpo.workbench.find_max import next_size, trial_row
from grpo.workbench.machine import no_compiler, probe_device
from grpo.workbench.models import num_parameters
from grpo.workbench.settings import Calculator, Check, FindMax
from grpo.workbench.sizes import SizeResult
from grpo.workbench.trial import made_up_prompts

CPU = torch.device("cpu")
TINY = {"arch": "gpt2", "layers": 1, "width": 32, "heads": 2, "context": 64}


def tried(size: int, *, peak: float, step_s=(1.0,), **metrics: float) -> SizeResult:
    """A trial that went well; peak: of the process, in bytes."""
    steps = [
        {"step": step, "loss": 0.5, "step_time": seconds, **metrics} for step, seconds in enumerate(step_s, 1)
    ]
    return SizeResult(size, "ok", memory=[{"process_bytes": int(peak)}], steps=steps)


def searched(room, *, believed=None, overhead=0.0, row_bytes=10.0, at_most=1024, multiple=1, classic=False):
    """Sizes that are tried on a device of `room` bytes from 64 on, and the largest that fits.

    believed: the room that the search is told of, if another.
    """
    own = {"group_size": multiple} if multiple > 1 else {"objective": "lm"}
    settings = FindMax(max_batch_size=at_most, strategy="classic" if classic else "line", **own)
    trials: list[SizeResult] = []
    while size := next_size(settings, trials, believed or room):
        peak = overhead + row_bytes * size
        trials.append(tried(size, peak=peak) if peak <= room else SizeResult(size, "out of memory"))
    fitted = (trial.batch_size for trial in trials if trial.is_finished)
    return [trial.batch_size for trial in trials], max(fitted, default=0)


def test_classic_adds_sixteen_or_halves_and_the_line_comes_close_in_whole_groups():
    """Sizes that failed are not tried again, nor more than may be used; four that fit make a line."""
    for multiple, at_most, room, expected in (
        (1, 1024, 1000, ([64, 80, 96, 112], 96)),
        (8, 1024, 250, ([64, 32, 16], 16)),
        (8, 1024, 50, ([64, 32, 16, 8], 0)),
        (8, 90, 10_000, ([64, 80, 88], 88)),
    ):
        assert searched(room, multiple=multiple, at_most=at_most, classic=True) == expected
    assert searched(10_000, at_most=4096, overhead=700.0) == ([64, 128, 930, 529], 930)
    assert searched(1000, multiple=8) == ([64, 128, 96, 32, 80], 96)  # the last two for the line alone
    assert searched(1000) == ([64, 128, 96, 100, 32], 100)
    assert searched(1000, multiple=8, at_most=72) == ([64, 72, 32, 48], 72)
    assert searched(50, multiple=8) == ([64, 32, 16, 8], 0)
    sizes, largest = searched(1000, row_bytes=40.0)
    assert sizes[:3] == [64, 32, 16] and 24 <= largest <= 25
    sizes, largest = searched(5000, believed=6000, overhead=300.0, multiple=8, at_most=4096)
    assert len(sizes) <= 8 and len(set(sizes)) == len(sizes) and 440 <= largest <= 470  # room was overrated


def test_a_trial_that_fails_for_another_reason_ends_the_search_and_names_its_log(tmp_path, monkeypatch):
    """A smaller one would fail as well; running out of memory is what the search goes on from."""
    ends, tries = ["out of memory", "failed"], []

    def fails(settings, size, folder) -> SizeResult:
        tries.append(size)
        return SizeResult(size, ends[len(tries) - 1], "ImportError: no peft")

    monkeypatch.setattr(find_max, "try_size", fails)
    log = tmp_path / "size-00032" / "printed.txt"
    with pytest.raises(ValueError, match=f"batch 32 failed, .* memory: ImportError: no peft; .* {log}"):
        find_max.find(find_max.Checked(FindMax(start=64), (), "cpu", GB), tmp_path)
    assert tries == [64, 32]


def test_a_trial_of_a_made_up_prompt_takes_real_steps_of_full_length(tmp_path):
    """In a process, on the bundled model: 16 tokens that the tokenizer makes, 6 new ones in each row."""
    settings = FindMax(
        device="cpu", precision="fp32", group_size=4, max_new_tokens=6, engine="off", prompt_tokens=16
    )
    prompts = made_up_prompts(dataclasses.replace(settings.train, batch_size=8), 16)
    assert len(prompts) == 2
    assert {len(load_tokenizer("rook-tiny")(row["prompt"])["input_ids"]) for row in prompts} == {16}
    with forked_workers():
        trial = find_max.try_size(settings, 8, tmp_path)
    assert trial.status == "ok" and trial.peak_bytes > 0, trial
    assert [step["completions/min_length"] for step in trial.steps] == [6.0] * 3
    assert [step["num_tokens"] for step in trial.steps] == [8 * 22, 16 * 22, 24 * 22]
    assert not (tmp_path / "size-00008/checkpoints").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_trial_runs_out_of_a_real_limit_where_a_plan_would_have_made_parts(tmp_path):
    """A trial of GRPO; of language modelling as a size of a sweep."""
    wide = FindMax(
        device="cpu",
        precision="fp32",
        memory_limit="1200MB",
        engine="off",
        max_new_tokens=100,
        max_batch_size=4096,
        prompt_tokens=16,
    )
    with forked_workers():
        trial = find_max.try_size(wide, 4096, tmp_path)
    assert trial.status == "out of memory", trial


def test_the_command_finds_tabulates_and_draws(tmp_path):
    words = "--objective lm --device cpu --arch gpt2 --layers 1 --width 32 --heads 2 --context 32 --start 8"
    done = run(
        "tests/grpo_lean.py",
        "find-max",
        *words.split(),
        "--max-batch-size",
        8,
        "--output",
        "out",
        "--data",
        ROOT / "README.md",
        cwd=tmp_path,
        traced=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Before the first trial" in done.stdout and "no larger one was to be tried" in done.stdout
    found = json.loads((tmp_path / "out" / "max_batch.json").read_text())
    assert found["maximum"] == 8
    assert [trial["batch_size"] for trial in found["trials"]] == [8, 4, 6, 2]
    for trial in found["trials"]:
        assert trial["status"] == "ok" and len(trial["steps"]) == 3 and trial["peak_bytes"] > 0
    assert (tmp_path / "out" / "max_batch.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_to_use_names_every_setting_and_what_train_lean_cannot_do_has_none(monkeypatch):
    words = (
        "--model 'my models/a' --group-size 4 --max-new-tokens 16 --kl-coef 0 --lora-rank 4 --device cuda:1 "
        "--gradient-checkpointing full --precision bf16 --memory-limit 800MB --stop a b --lora-merge"
    )
    flags = findings.flags_of(FindMax.parse(shlex.split(words)).train)
    assert parse_command_line(shlex.split(flags)) == parse_command_line(shlex.split(words))
    assert findings.flags_of(Config()) == ""

    def no_command(settings):
        return find_max.check(dataclasses.replace(settings, device="cpu")).no_command

    source = load_source(Config(model="rook-tiny"))
    monkeypatch.setattr(find_max, "load_source", lambda config: source)  # it takes seconds
    assert no_command(FindMax()) is None and no_command(FindMax(prompt_tokens=59)) is None
    assert "up to 59 tokens, unlike --prompt-tokens 16" in no_command(FindMax(prompt_tokens=16))
    assert "language modelling" in no_command(FindMax(objective="lm", data="bundled", **TINY))
    without, with_flags = published(no_command="it trains chess alone"), published(flags="--lora-rank 4")
    assert "it trains chess alone" in facts_of(without)["command"][1]
    assert all("command" not in row for row in without.recommended())
    commands = [row["command"] for row in with_flags.recommended()]
    assert {command.endswith(" --lora-rank 4") for command in commands} == {True}
    assert "--batch-size 192 --train-rows 96" in commands[2] and "--num_processes 2 " in commands[3]


def test_the_table_of_trials_is_that_of_the_guide_on_a_card():
    """Rows, allocated, reserved, samples a minute, status; on a host there is no allocator to be asked."""
    on_card = {"memory/peak_gb": 2.0, "memory/reserved_gb": 2.5}
    trials = [tried(64, peak=3 * GB, step_s=(30.0, 20.0, 24.0), **on_card), SizeResult(128, "out of memory")]
    shown = table(list(map(trial_row, trials)))
    cells = {column.header: list(column.cells) for column in shown.columns}
    assert cells["batch"] == ["64", "128"] and cells["status"] == ["ok", "out of memory"]
    assert [cells[f"{name}, GB"][0] for name in ("peak", "allocated", "reserved")] == [
        "3.000",
        "2.000",
        "2.500",
    ]
    assert cells["samples/min"] == ["160", ""]  # 64 in 24 s, the last step's
    of_rewards = dataclasses.replace(trials[0], higher_is_better=True)
    assert cells["loss"][0] == "0.5000" and trial_row(of_rewards)["loss"] is None  # it is 0 with GRPO
    host = table([trial_row(tried(64, peak=GB))])
    assert "reserved, GB" not in [column.header for column in host.columns]


# As the manual recipe published them: a device of 47.4 GB, out of memory at 208.
PEAKS = (14.80, 18.08, 21.36, 24.64, 27.92, 31.21, 34.49, 37.77, 41.06)
PUBLISHED = dict(zip(range(64, 193, 16), (GB * peak for peak in PEAKS), strict=True))
DEVICE = 47.4 * GB


def first(count):
    return dict(list(PUBLISHED.items())[:count])


def published(**changes) -> findings.Findings:
    known = {"peaks": PUBLISHED, "failed": [208], "total_bytes": DEVICE, "multiple": 1}
    margin = {"margin_bytes": line.safety_margin(DEVICE, "cuda"), "margin_reason": "for what does not show"}
    return findings.Findings(**{**known, **margin, **changes})


def facts_of(found: findings.Findings) -> dict:
    return {row["what"]: (row["value"], row["note"]) for row in found.facts()}


def test_the_published_law_follows_from_its_first_three_points_and_what_is_no_line_is_said():
    """208 is a risk and 224 certain, though the line has room for 208: a margin of 3.06 GB would tell."""
    law, margin = line.fit_line(first(3)), line.safety_margin(DEVICE, "cuda")
    assert law.bytes_per_sample / GB == pytest.approx(0.2052, rel=0.01)
    assert law.start_bytes / GB == pytest.approx(14.80, rel=0.001)
    assert law(208) / GB == pytest.approx(44.3, abs=0.05) and law(208) < DEVICE
    risks = {176: "no", 192: "no", 208: "likely", 224: "certain"}
    assert {size: law.risk(size, DEVICE, margin) for size in risks} == risks
    enough, small = (facts_of(published(margin_bytes=size))["208 on the line"] for size in (margin, GB))
    assert enough[0] == "44.34 GB" and "a margin of 3.06 GB (6.5%)" in enough[1]
    assert "is enough" in enough[1] and "was not" in small[1]
    following = published(peaks=first(4), failed=[]).next_sizes()
    assert [row["batch"] for row in following] == [128, 144, 208, 224]
    assert [row["out of memory?"] for row in following] == ["no", "no", "likely", "certain"]
    assert [row["out of memory?"] for row in published().next_sizes()] == ["yes, tried", "certain"]
    assert line.safety_margin(100.0, "cpu") == pytest.approx(2.0)  # on a host the scatter alone
    bent = {**first(5), 144: PUBLISHED[144] + 2 * GB}
    assert "no line from 144 on" in facts_of(published(peaks=bent, failed=[]))["R²"][1]
    few = published(peaks=first(3))  # through which there is nearly always a line
    assert few.next_sizes() == [] and "takes 4 sizes" in facts_of(few)["line"][1]
    assert facts_of(published(peaks=first(4)))["R²"] == ("1.0000", "a line throughout")
    assert line.first_outlier(PUBLISHED) is None and line.first_outlier(first(3)) is None
    assert line.fit_line({1: 1.0, 2: 3.0, 3: 2.0}).r_squared == pytest.approx(0.25)
    flat = published(peaks={8: 5.0 * GB, 16: 5.0 * GB}, failed=[])
    assert flat.line is None and flat.next_sizes() == [] and facts_of(flat)["line"][0] == "none"


def test_what_others_hold_is_not_there_to_be_used(monkeypatch):
    """A card of 24 GB has 14 free, and trials are bounded by what is free."""
    there = dataclasses.replace(probe_device("cpu", "fp32"), total_bytes=24 * GB, usable_bytes=14 * GB)
    monkeypatch.setattr("grpo.workbench.machine.probe_device", lambda *args: there)
    checked = find_max.check(FindMax(objective="lm", data="bundled", device="cpu", **TINY))
    assert checked.usable_bytes == 14 * GB and checked.settings.memory_limit == str(14 * GB)
    assert findings.findings(checked, [tried(8, peak=GB)]).total_bytes == 14 * GB


def test_recommendations_are_whole_groups():
    found = published(multiple=8, peaks={96: 10 * GB, 104: 11 * GB}, failed=[], no_command="none")
    rows = [tuple(row.values()) for row in found.recommended()]
    assert rows == [
        ("full", 1, 104, 1, 104),
        ("safe", 1, 80, 1, 80),
        ("accumulated", 1, 48, 2, 96),
        ("safe", 2, 80, 1, 160),
        ("safe", 4, 80, 1, 320),
        ("safe", 8, 80, 1, 640),
    ]


COUNTS = {"gpu": "h100", "frozen": (8e9, 7e9), "trainable": 1e8}


def calculated(**settings) -> dict:
    wanted = Calculator(**settings)
    return calculate(wanted, find_card(wanted.gpu, wanted.gpu_memory))


def lines(figures: dict) -> dict[str, float]:
    return {line["name"]: line["bytes"] for line in figures["lines"]}


def batch_sizes(figures: dict) -> list[int | None]:
    return [share["batch_size"] for share in figures["shares"]]


def test_a_card_is_found_however_it_is_written_and_offers_less_than_it_is_sold_with():
    assert find_card("H100") is CARDS["h100"] and find_card("a100_80gb") is CARDS["a100-80gb"]
    assert find_card("RTX 4090").sold_gb == 24 and find_card(None, "20GB") == Card("20gb", 20)
    assert CARDS["h100"].usable_bytes == pytest.approx(0.98 * 80 * GB, abs=1)
    assert CARDS["l40s"].usable_bytes == pytest.approx(0.98 * 15 / 16 * 48 * GB, abs=1)  # ECC: 44.1 GB
    assert [CARDS[name].bf16 for name in ("t4", "v100-16gb", "a10")] == [False, False, True]


def test_the_published_h100_budget_follows_from_its_counts_and_they_tell_no_batch():
    """30 GB of frozen weights, 1.2 of optimizer, 0.2 of gradients, 8 % overhead, 42 of 80 left (10**9)."""
    found = calculated(**COUNTS)
    assert lines(found) == {
        "frozen, 8 + 7 B": 30e9,
        "trainable, 0.1 B": 0.2e9,
        "gradients": 0.2e9,
        "optimizer": pytest.approx(1.2e9),
        "overhead": pytest.approx(0.08 * 78.4 * GB),
    }
    rows = {row["line"]: (row["GB"], row["10**9 bytes"]) for row in budget_rows(found)}
    assert (
        rows.items()
        >= {
            "card": ("78.40", "80.00"),
            "frozen, 8 + 7 B": ("27.94", "30.00"),
            "optimizer": ("1.12", "1.20"),
            "overhead": ("6.27", "6.40"),
            "remains": ("42.70", "42.00"),  # 80 - 30 - 0.2 - 1.2 - 0.2 - 6.4
        }.items()
    )
    assert batch_sizes(found) == [None] * 3 and found["totals"] == {}
    assert "no batch follows" in found["notes"][0] and "--sample-memory" in found["notes"][0]
    layouts = {("fp32", None): [4, 8, 4], ("bf16", "adamw-8bit"): [2, 2, 2], (None, "sgd"): [2, 4, 2]}
    for (weights, optimizer), sizes in layouts.items():
        found = calculated(**{**COUNTS, "trainable": 1e9}, weights=weights, optimizer=optimizer)
        assert [line["bytes"] / 1e9 for line in found["lines"][1:4]] == sizes
    assert calculated(**COUNTS, frozen_dtype="int4")["lines"][0]["bytes"] == 7.5e9


def test_batches_of_samples_of_a_known_size(tmp_path):
    """At 85 %: 66.64 - 27.94 - 1.49 - 6.27 = 30.94 GB, of 0.44 GB each; 70 are 64 in whole groups of 8."""
    small = {"sample_memory": "450.56MB", "gpus": 3, "max_new_tokens": 20, "kl_coef": 0.0}
    found = calculated(**COUNTS, **small, accumulate=2)
    assert batch_sizes(found) == [61, 70, 79]
    assert found["totals"] == {1: 140, 2: 280, 3: 420, 4: 560, 8: 1120}
    row = [cell for cell in share_rows(found, 2)[1].values() if cell is not None]
    assert row == ["85%", "66.64", "30.94", 70, 140, 280, 420, 560, 1120]
    wanted = Calculator(**COUNTS, **small)
    names = write_profiles(wanted, calculated(**COUNTS, **small), tmp_path / "p.yaml")
    assert names == ["h100_single", "h100_dual", "h100_x3", "h100_quad", "h100_octo"]
    for name, count in zip(names, (1, 2, 3, 4, 8), strict=True):
        config = parse_command_line(["--config", str(tmp_path / "p.yaml"), "--profile", name])
        assert (config.batch_size, config.memory_utilization) == (count * 64, 0.85)
        assert (config.max_new_tokens, config.kl_coef) == (20, 0)
    assert config.model == "auto" and "--model FOLDER" in (tmp_path / "p.yaml").read_text()  # no name known


def named(folder, **changes) -> dict:
    """A model's budget on 4 GB with short texts."""
    return {"gpu_memory": "4GB", "prompt_tokens": 16, "model": str(folder), "max_new_tokens": 16, **changes}


def test_adapters_freeze_the_base_and_in_4_bits_it_leaves_more_room(made_up_plans, model_folders, tmp_path):
    gpt2 = shape_of(str(model_folders["gpt2"]))
    width, count = gpt2.n_embd, num_parameters(gpt2)
    trained = gpt2.n_layer * 4 * (width + 3 * width)  # A and B of each c_attn
    assert (
        lines(calculated(**named(model_folders["gpt2"], lora_rank=4))).items()
        >= {
            "frozen base and adapters": 2 * count + 4 * trained,
            "optimizer": 8 * trained,
            "gradients": 4 * trained,
            "sampler's copy": 2 * gpt2.vocab_size * width,  # of the head alone, centred
        }.items()
    )
    wanted = [named(model_folders["llama"], lora_rank=4, load_in_4bit=packed) for packed in (False, True)]
    plain, packed = (calculated(**settings) for settings in wanted)
    base = lines(plain)["frozen base and adapters"]
    assert lines(packed)["frozen base in 4 bits and adapters"] < base
    assert "frozen reference" not in lines(plain) and packed["fixed_bytes"] < plain["fixed_bytes"]
    write_profiles(Calculator(**wanted[1]), packed, tmp_path / "p.yaml")
    assert "load_in_4bit: true" in (tmp_path / "p.yaml").read_text()


def test_a_models_budget_is_the_planners_as_it_is_printed_and_written(model_folders):
    """Four GB, a frozen model of half a billion parameters beside a tiny one, whose peaks are traced."""
    settings = named(model_folders["gpt2"], kl_coef=0.0, memory_utilization=0.6)
    found = calculated(**settings, frozen=(0.5e9,))
    count = num_parameters(shape_of(str(model_folders["gpt2"])))
    assert (
        lines(found).items()
        >= {
            "frozen, 0.5 B": 1e9,
            "gradients": 4 * count,
            "overhead": CONTEXT_BYTES,
        }.items()
    )
    # Of masters one half may be the model's weight in bf16, and the other the optimizer's.
    assert lines(found)["trainable weights"] + lines(found)["optimizer"] == 12 * count
    assert [share["share"] for share in found["shares"]] == [0.6, 0.8, 0.85, 0.9]
    assert found["batch_size"] == found["shares"][0]["batch_size"]
    resident = sum(lines(found).values()) - 4 * count  # without gradients, which are added
    wanted = Calculator(**settings)
    work = Model(wanted, find_card(None, "4GB")).work
    traced = TracedPhases(work)
    for share in found["shares"]:
        added = {p: traced.added_bytes(p, work.size(share["batch_size"])) for p in ("sample", "learn")}
        assert share["fullest"] == max(added, key=added.get)
        assert share["peak_bytes"] == pytest.approx(resident + max(added.values()))
        assert share["peak_bytes"] == pytest.approx(share["usable_bytes"], rel=0.01)  # by a fitted line
        assert share["usable_bytes"] == pytest.approx(share["share"] * 0.98 * 4 * GB)
    assert found["fixed_bytes"] + found["remaining_bytes"] == pytest.approx(0.98 * 4 * GB)
    assert found["totals"][4] == 4 * found["batch_size"]
    on_t4 = calculated(**{**settings, "gpu": "t4", "gpu_memory": None, "precision": "bf16"})
    assert on_t4["notes"][-1] == "t4 has no native bf16: it is emulated, and slow."


def test_the_calculator_as_it_is_typed_of_counts_and_of_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "--gpu h100 --frozen 8e9 --frozen 7e9 --trainable 1e8 --yaml p.yaml"
    done = here("calculate", *words.split())
    assert done.returncode == 2 and "42.70" in done.stdout and "10**9 bytes" in done.stdout
    assert "error yaml is p.yaml, but no batch of whole groups of 8 is known to fit" in done.stderr
    assert not (tmp_path / "p.yaml").exists()

    words = "--gpu rtx4090 --model rook-tiny --prompt-tokens 16 --max-new-tokens 16 --kl-coef 0 --yaml p.yaml"
    with untraced(1e7):
        done = here("calculate", *words.split(), "--json", "p.json")
    assert done.returncode == 0, done.stderr
    assert "rook-tiny, bfloat16, 16 + 16 tokens, groups of 8" in done.stdout
    assert "10**9 bytes" not in done.stdout
    stored = json.loads((tmp_path / "p.json").read_text())
    held = {line["name"]: line["bytes"] for line in stored["lines"]}
    count, size = num_parameters(shape_of("rook-tiny")), stored["shares"][1]["batch_size"]
    in_fp32 = (902 + 512) * 256 + (2 * 4 + 1) * 2 * 256  # numbers of embeddings and norms
    assert held["trainable weights"] == 2 * count + 2 * in_fp32
    assert held["optimizer"] == 10 * count - 2 * in_fp32
    assert held["gradients"] == 4 * count
    assert held["sampler's copy"] == 2 * 902 * 256  # the head, which is centred
    config = parse_command_line(["--config", "p.yaml", "--profile", "rtx4090_dual"])
    assert (config.model, config.batch_size, config.precision) == ("rook-tiny", 2 * size, "bf16")
    assert size > 0 and size % 8 == 0 and config.kl_coef == 0
    assert "rtx4090" in here("calculate").stdout  # all cards


def test_without_a_hub_the_shape_of_the_usual_model_is_built_in(monkeypatch, logged):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("grpo.model.names._answers", lambda name: False)
    assert num_parameters(shape_of("jrahn/RookWorld-LM-124M")) == 124_439_808
    assert any("built-in shape of jrahn/RookWorld-LM-124M" in line for line in logged)


def test_switches_that_are_off_say_what_to_type(monkeypatch):
    def found(flags: set[str], dtype: torch.dtype = torch.float32) -> dict:
        monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: flags)
        return {row["switch"]: (row["state"], row["to switch it on"]) for row in switches(CPU, dtype)}

    monkeypatch.setattr("grpo.workbench.check.available_cores", lambda: 96)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    now = found({"amx_bf16"})
    assert now["threads"] == ("off", "export OMP_NUM_THREADS=96")
    assert now["bf16"] == ("off", "--precision bf16")
    assert now["compile"][0] == "off" and now["TF32"][0] == "not here"
    assert all(bool(remedy) == (state == "off") for state, remedy in now.values())
    assert found({"amx_bf16"}, torch.bfloat16)["bf16"][0] == "on" and found(set())["bf16"][0] == "not here"
    assert "install g++" in no_compiler(CPU)
    monkeypatch.setenv("CXX", sys.executable)  # anything that can be run
    assert no_compiler(CPU) is None


def test_rates_are_of_the_first_way_and_of_others_and_the_command_says_them(monkeypatch):
    machine, threads = probe_device("cpu", "fp32", "1MB"), torch.get_num_threads()
    assert (machine.device, machine.precision, machine.usable_bytes) == ("cpu", "fp32", 2**20)
    with monkeypatch.context() as patched:
        patched.setattr("grpo.model.target._cpu_flags", lambda: {"amx_bf16"})
        patched.setattr("grpo.workbench.check.available_cores", lambda: 2)
        settings = Check(**TINY, batch_size=2, steps=1, precision="fp32")
        rates = list(training_rates(settings, CPU))
    assert [row["step"] for row in rates] == [
        "as it is, in fp32",
        "in bf16",
        f"with {2 if threads < 2 else 1} threads",
    ]
    assert rates[0]["of the first"] == "1.00" and torch.get_num_threads() == threads
    words = "--arch gpt2 --layers 1 --width 32 --heads 2 --context 32 --steps 1"
    done = here("check", *words.split())
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("tokens/s", "GFLOP/s", "TF32", "compile"))
