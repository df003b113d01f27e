"""The largest batch: by trials, on a line through peaks, for a card that is not there; and rates here."""

import dataclasses
import io
import json
import shlex
import sys

import pytest
import torch
from commands import ROOT, here, run
from conftest import untraced
from forked import forked_workers
from rich.console import Console

from grpo.config import Config, parse_command_line
from grpo.memory.budget import CONTEXT_BYTES, GB
from grpo.workbench.calculator.calculate import Calculation, calculate
from grpo.workbench.calculator.cards import CARDS, Card, card_of_size, find_card
from grpo.workbench.calculator.profiles import write_profiles
from grpo.workbench.calculator.settings import CalculatorSettings
from grpo.workbench.calculator.tables import as_json, notes, show
from grpo.workbench.machine import look, no_compiler
from grpo.workbench.maximum import find, findings, law, trial
from grpo.workbench.maximum.search import TrialResult, classic_sizes, predicted_sizes, run_search
from grpo.workbench.maximum.settings import FindSettings
from grpo.workbench.models import num_parameters
from grpo.workbench.performance.measure import training_rates
from grpo.workbench.performance.settings import PerformanceSettings
from grpo.workbench.performance.switches import switches
from grpo.workbench.predict import Parts, StepMemory, StepSettings
from grpo.workbench.processes import run_worker
from grpo.workbench.spec import ModelSpec

CPU = torch.device("cpu")
TINY = ModelSpec(arch="gpt2", layers=1, width=32, heads=2, context=64)


def plain(text: str) -> str:
    """Without the lines of tables."""
    return " ".join(text.replace("│", " ").split())


class Line:
    """A memory model: so many bytes a row, wrong by a factor."""

    def __init__(self, bytes_per_row, multiple=1):
        self.bytes_per_row, self.multiple = bytes_per_row, multiple

    def largest_phase(self, batch_size):
        return "learn", Parts({"activations": self.bytes_per_row * batch_size})

    def largest_batch(self, usable_bytes, *, at_most):
        size = int(min(at_most, usable_bytes / self.bytes_per_row))
        return max(0, size // self.multiple * self.multiple)


def tried(search, room, bytes_per_row=10.0, overhead=0.0) -> tuple[list[int], int]:
    """The sizes of a search on a device of `room` bytes, and the largest that fits."""

    def attempt(size, before):
        peak = overhead + bytes_per_row * size
        if peak > room:
            return TrialResult(size, "out of memory")
        return TrialResult(size, "ok", peak_bytes=peak, losses=[1.0], step_s=[1.0])

    results = run_search(search, attempt)
    fitted = (result.batch_size for result in results if result.fits)
    return [result.batch_size for result in results], max(fitted, default=0)


def predicted(line, room, *, start=64, at_most=1024, **device) -> tuple[list[int], int]:
    """What the search by a model tries, and finds."""
    search = predicted_sizes(line, room, start=start, multiple=line.multiple, at_most=at_most)
    return tried(search, room, **device)


def test_classic_adds_sixteen_or_halves_and_predict_comes_close_in_whole_groups():
    """What failed is not tried again, nor more than may be used."""
    for multiple, at_most, room, expected in (
        (1, 1024, 1000, ([64, 80, 96, 112], 96)), (8, 1024, 250, ([64, 32, 16], 16)),
        (8, 1024, 50, ([64, 32, 16, 8], 0)), (8, 90, 10_000, ([64, 80, 90], 90)),
    ):  # fmt: skip
        assert tried(classic_sizes(64, multiple=multiple, at_most=at_most), room) == expected
    for believed in (8.0, 10.0, 13.0):
        sizes, largest = predicted(Line(believed), 10_000, at_most=4096, overhead=700.0)
        assert len(sizes) <= 4 and largest >= 0.97 * 930
    sizes, _ = predicted(Line(9.0, multiple=8), 5000, start=60, overhead=300.0)
    assert all(size % 8 == 0 for size in sizes) and len(set(sizes)) == len(sizes)
    assert predicted(Line(10.0), 1000)[0] == [64, 100, 82]  # the third for the line alone
    assert predicted(Line(10.0, multiple=8), 1000, at_most=72)[0] == [64, 72, 32]
    sizes, largest = predicted(Line(2.0), 1000, bytes_per_row=40.0)
    assert sizes[:3] == [64, 32, 16] and 16 <= largest <= 25


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_trial_takes_real_steps_and_runs_out_of_a_real_limit():
    """The first in a Python of its own, as for people."""
    task = trial.TrialTask("grpo", vars(TINY), 8, "cpu", "fp32", prompt_tokens=8, new_tokens=16, group_size=4)
    limited = dataclasses.replace(
        task, objective="lm", new_tokens=64, data=str(ROOT / "README.md"), batch_size=60_000,
        memory_limit_bytes=1200 * 2**20,
    )  # fmt: skip
    said = []
    assert run_worker(trial.__name__, vars(task), said.append).status == "ok"
    with forked_workers():
        assert run_worker(trial.__name__, vars(limited), said.append).status == "out of memory"
    assert [record["step"] for record in said] == [1, 2, 3]
    assert all(record["process_bytes"] > 0 for record in said)


def test_the_command_finds_tabulates_and_draws(tmp_path):
    words = "--objective lm --device cpu --arch gpt2 --layers 1 --width 32 --heads 2 --context 32 --start 8"
    done = run(
        "scripts/find_max_batch_size.py", *words.split(), "--max-batch-size", 8, "--output", "out",
        "--data", ROOT / "README.md", cwd=tmp_path, traced=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Before the first trial" in done.stdout and "Largest batch that fitted: 8" in done.stdout
    found = json.loads((tmp_path / "out" / "max_batch.json").read_text())
    assert found["maximum"] == 8
    assert [each["batch_size"] for each in found["trials"]] == [8, 4]
    for each in found["trials"]:
        assert each["status"] == "ok" and len(each["losses"]) == 3
        assert each["predicted_bytes"] == pytest.approx(each["peak_bytes"], rel=0.25)
    assert (tmp_path / "out" / "max_batch.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_to_use_names_every_setting_and_what_train_lean_cannot_do_has_none(monkeypatch):
    settings = FindSettings(
        model=ModelSpec(model="my models/a"), group_size=4, max_new_tokens=16, kl=False, lora_rank=4,
        gradient_checkpointing="full", device="cuda:1", precision="bf16", memory_limit="800MB",
    )  # fmt: skip
    config = parse_command_line(["--batch-size", "8", *shlex.split(find.train_lean_flags(settings))])
    assert (config.model, config.group_size, config.sampling.max_new_tokens) == ("my models/a", 4, 16)
    assert (config.uses_reference, config.lora.lora_rank, config.gradient_checkpointing) == (False, 4, "full")
    assert (config.device, config.precision, config.memory_limit) == ("cuda:1", "bf16", "800MB")
    assert find.train_lean_flags(FindSettings()) == " --model rook-tiny"

    source = find.load_source(Config(model="rook-tiny"))
    monkeypatch.setattr(find, "load_source", lambda config: source)  # it takes seconds
    assert find.why_no_command(FindSettings()) is None
    assert "give --prompt-tokens 59" in find.why_no_command(FindSettings(prompt_tokens=16))
    assert "language modelling" in find.why_no_command(FindSettings(objective="lm"))
    assert "no model made by --arch" in find.why_no_command(FindSettings(model=TINY))
    peaks = ("64=14.8GB", "80=18.08GB", "208=oom")
    elsewhere = find.findings_elsewhere(FindSettings(measured=peaks, device_memory="47.4GB"))
    assert (elsewhere.maximum, elsewhere.failed) == (80, [208]) and "elsewhere" in elsewhere.no_command
    without, found = published(no_command="it trains chess alone"), published(flags=" --lora-rank 4")
    assert any("it trains chess alone" in sentence for sentence in findings.sentences(without))
    assert findings.recommendation_table(without).columns[-1].header == "batch"
    assert all("YOUR_SCRIPT" in command for command in findings.cards_table(without).columns[-1].cells)
    for table in (findings.recommendation_table(found), findings.cards_table(found)):
        assert {command.endswith(" --lora-rank 4") for command in table.columns[-1].cells} == {True}


# As the manual recipe published them: a device of 47.4 GB, out of memory at 208.
PEAKS = (14.80, 18.08, 21.36, 24.64, 27.92, 31.21, 34.49, 37.77, 41.06)
PUBLISHED = dict(zip(range(64, 193, 16), (GB * peak for peak in PEAKS), strict=True))
DEVICE = 47.4 * GB


def first(count):
    return dict(list(PUBLISHED.items())[:count])


def published(**changes) -> findings.Findings:
    given = {"peaks": PUBLISHED, "failed": [208], "total_bytes": DEVICE, "multiple": 1}
    return findings.Findings(**{**given, "margin_bytes": law.unseen_margin(DEVICE, "cuda"), **changes})


def test_the_published_law_follows_from_its_first_three_points_and_what_is_no_line_is_said():
    """208 is a risk and 224 certain, though the line has room for 208: a margin of 3.06 GB would tell."""
    line, margin = law.fit_law(first(3)), law.unseen_margin(DEVICE, "cuda")
    assert line.bytes_per_sample / GB == pytest.approx(0.2052, rel=0.01)
    assert line.start_bytes / GB == pytest.approx(14.80, rel=0.001)
    assert line(208) / GB == pytest.approx(44.3, abs=0.05) and line(208) < DEVICE
    risks = {176: "fits", 192: "fits", 208: "likely", 224: "certain"}
    assert {size: law.risk(line, size, DEVICE, margin) for size in risks} == risks
    enough, small = (" ".join(findings.sentences(published(margin_bytes=each))) for each in (margin, GB))
    assert "a margin of 3.06 GB (6.5%)" in enough and "is enough" in enough and "was not" in small
    assert published(peaks=first(3), failed=[]).next_sizes() == [112, 128, 208, 224]
    assert list(findings.next_table(published()).columns[2].cells) == ["yes, tried", "certain"]
    assert law.unseen_margin(100.0, "cpu") == pytest.approx(2.0)  # on a host the scatter alone
    assert law.leaves_the_line(PUBLISHED) is None and law.leaves_the_line(first(3)) is None
    bent = {**first(5), 144: PUBLISHED[144] + 2 * GB}
    assert "line at 144" in " ".join(findings.sentences(published(peaks=bent, failed=[])))
    told = {count: " ".join(findings.sentences(published(peaks=first(count), failed=[]))) for count in (3, 4)}
    assert "cannot be told from 3 sizes" in told[3] and "R²" not in told[3]
    assert "Nowhere in what was measured" in told[4] and "R² 1.0000" in told[4]
    assert law.fit_law({1: 1.0, 2: 3.0, 3: 2.0}).r_squared == pytest.approx(0.25)
    flat = published(peaks={8: 5.0 * GB, 16: 5.0 * GB}, failed=[])
    assert flat.law is None and flat.next_sizes() == []
    assert "No line" in " ".join(findings.sentences(flat))


def test_what_others_hold_is_not_there_to_be_used(monkeypatch):
    """Of a card of 24 GB on which 14 are free, as trials are bounded by what is free."""
    there = dataclasses.replace(look("cpu", "fp32"), total_bytes=24 * GB, usable_bytes=14 * GB)
    monkeypatch.setattr(find, "look", lambda *args: there)
    assert find.check(FindSettings(device="cpu")).total_bytes == 14 * GB


def test_recommendations_are_whole_groups():
    found = published(multiple=8, peaks={96: 10 * GB, 104: 11 * GB}, failed=[])
    assert findings.recommendations(found) == {
        "full": {"rows": 104, "accumulate": 1, "batch_size": 104},
        "safe": {"rows": 80, "accumulate": 1, "batch_size": 80},
        "accumulated": {"rows": 48, "accumulate": 2, "batch_size": 96},
    }
    assert list(findings.cards_table(found).columns[1].cells) == ["80", "160", "320", "640"]
    for most, capped in ((192, True), (256, False)):
        assert ("--max-batch-size" in findings.sentences(published(at_most=most))[0]) == capped


COUNTS = {"gpu": "h100", "frozen": (8e9, 7e9), "trainable": 1e8}


def calculated(**settings) -> Calculation:
    wanted = CalculatorSettings(**settings)
    return calculate(wanted, wanted.card())


def shown(found: Calculation) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    show(found, console)
    return plain(console.export_text())


def lines(found: Calculation) -> dict[str, float]:
    return {line.name: line.bytes for line in found.demand.lines}


def test_a_card_is_found_however_it_is_written_and_offers_less_than_it_is_sold_with():
    assert find_card("H100") is CARDS["h100"] and find_card("a100_80gb") is CARDS["a100-80gb"]
    assert find_card("RTX 4090").sold_gb == 24 and card_of_size("20GB") == Card("20gb", 20)
    assert CARDS["h100"].usable_bytes == pytest.approx(0.98 * 80 * GB, abs=1)
    assert CARDS["l40s"].usable_bytes == pytest.approx(0.98 * 15 / 16 * 48 * GB, abs=1)  # ECC: 44.1 GB
    assert [CARDS[name].bf16 for name in ("t4", "v100-16gb", "a10")] == [False, False, True]


def test_the_published_h100_budget_follows_from_its_counts_and_they_tell_no_batch():
    """30 GB of frozen weights, 1.2 of optimizer, 0.2 of gradients, 8 % overhead, 42 of 80 left (10**9)."""
    found = calculated(**COUNTS)
    assert lines(found) == {
        "frozen, 8 + 7 B": 30e9, "trainable, 0.1 B": 0.2e9, "gradients": 0.2e9,
        "optimizer": pytest.approx(1.2e9), "overhead": pytest.approx(0.08 * 78.4 * GB),
    }  # fmt: skip
    assert found.demand.fixed_bytes == pytest.approx(31.6e9 + 0.08 * 78.4 * GB)
    rows = ("card 78.40 80.00", "frozen, 8 + 7 B 27.94 30.00", "optimizer 1.12 1.20", "overhead 6.27 6.40",
            "remains 42.70 42.00")  # fmt: skip
    assert all(f" {row} " in shown(found) for row in rows)  # 80 - 30 - 0.2 - 1.2 - 0.2 - 6.4
    assert [row.batch_size for row in found.rows] == [None] * 3 and found.totals() == {}
    assert "no batch follows" in notes(found)[0] and "--sample-memory" in notes(found)[0]
    layouts = {("fp32", None): [4, 8, 4], ("bf16", "adamw-8bit"): [2, 2, 2], (None, "sgd"): [2, 4, 2]}
    for (weights, optimizer), sizes in layouts.items():
        found = calculated(**{**COUNTS, "trainable": 1e9}, weights=weights, optimizer=optimizer)
        assert [line.bytes / 1e9 for line in found.demand.lines[1:4]] == sizes
    assert calculated(**COUNTS, frozen_dtype="int4").demand.lines[0].bytes == 7.5e9


def test_batches_of_samples_of_a_known_size(tmp_path):
    """At 85 %: 66.64 - 27.94 - 1.49 - 6.27 = 30.94 GB, of 0.44 GB each; 70 are 64 in whole groups of 8."""
    small = {"sample_memory": "450.56MB", "gpus": 3, "max_new_tokens": 20, "kl": False}
    found = calculated(**COUNTS, **small, batch_size=20, accumulate=2)
    assert [row.batch_size for row in found.rows] == [61, 70, 79]
    assert found.totals() == {1: 140, 2: 280, 3: 420, 4: 560, 8: 1120}
    assert found.use.bytes == pytest.approx(found.demand.fixed_bytes + 20 * 0.44 * GB)
    assert "85% 66.64 30.94 70 140 280 420" in shown(found)
    names = write_profiles(calculated(**COUNTS, **small), tmp_path / "p.yaml")
    assert names == ["h100_single", "h100_dual", "h100_x3", "h100_quad", "h100_octo"]
    for name, count in zip(names, (1, 2, 3, 4, 8), strict=True):
        config = parse_command_line(["--config", str(tmp_path / "p.yaml"), "--profile", name])
        assert (config.batch_size, config.memory_utilization) == (count * 64, 0.85)
        assert (config.sampling.max_new_tokens, config.loss.kl_coef) == (20, 0)
    assert config.model == "auto" and "--model FOLDER" in (tmp_path / "p.yaml").read_text()  # no name known


def test_adapters_freeze_the_base_and_in_4_bits_it_leaves_more_room(made_up_plans, tmp_path):
    settings = {"gpu_memory": "4GB", "lora_rank": 4, "max_new_tokens": 16, "prompt_tokens": 16}
    trained = 4 * (32 + 3 * 32)  # A and B of the one c_attn
    assert lines(calculated(model=TINY, **settings)).items() >= {
        "frozen base and adapters": 2 * num_parameters(TINY.config()) + 4 * trained,
        "optimizer": 8 * trained, "gradients": 4 * trained,
        "sampler's copy": 2 * TINY.config().vocab_size * 32,  # of the head alone, centred
    }.items()  # fmt: skip
    model = ModelSpec(arch="llama", layers=1, width=128, heads=2, context=64)
    plain, packed = (calculated(model=model, load_in_4bit=packed, **settings) for packed in (False, True))
    base = lines(plain)["frozen base and adapters"]
    assert lines(packed)["frozen base in 4 bits and adapters"] < base and "frozen reference" not in lines(
        plain
    )
    assert packed.demand.fixed_bytes < plain.demand.fixed_bytes
    write_profiles(packed, tmp_path / "p.yaml")
    assert "load_in_4bit: true" in (tmp_path / "p.yaml").read_text()


def test_a_models_budget_is_the_predictors_as_it_is_printed_and_written():
    """Four GB, a frozen model of half a billion parameters beside the tiny one, whose peaks are traced."""
    found = calculated(
        model=TINY, objective="lm", gpu_memory="4GB", frozen=(0.5e9,), memory_utilization=0.6, batch_size=13
    )
    step = StepSettings("lm", TINY.config(), torch.bfloat16, new_tokens=64, device_type="cuda")
    memory, count = StepMemory(step, overhead_bytes=CONTEXT_BYTES), num_parameters(TINY.config())
    assert lines(found) == {
        "frozen, 0.5 B": 1e9, "trainable weights": 4 * count, "optimizer": 8 * count,
        "gradients": 4 * count, "overhead": CONTEXT_BYTES,
    }  # fmt: skip
    assert [row.share for row in found.rows] == [0.6, 0.8, 0.85, 0.9] and found.row.share == 0.6
    for row in found.rows:
        room = row.share * 0.98 * 4 * GB - 1e9
        needed = memory.largest_phase(row.batch_size)[1].peak_bytes
        assert needed == pytest.approx(room, rel=0.005)  # the line that is searched is fitted
        assert row.peak.bytes == pytest.approx(needed + 1e9)
    assert found.use.bytes == pytest.approx(1e9 + memory.largest_phase(13)[1].peak_bytes)
    assert "gpt2 1 x 32, vocabulary 256, lm, bf16" in shown(found)
    stored = json.loads(json.dumps(as_json(found)))
    assert stored["fixed_bytes"] + stored["remaining_bytes"] == pytest.approx(found.card.usable_bytes)
    assert stored["totals"]["4"] == 4 * found.row.batch_size
    old = dataclasses.replace(found, card=CARDS["t4"], precision="fp32")
    assert notes(old)[-1] == "t4 has no native bf16: this is for fp32."


def test_the_calculator_as_it_is_typed_of_counts_and_of_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "--gpu h100 --frozen 8e9 --frozen 7e9 --trainable 1e8 --yaml p.yaml"
    done = here("calculate", *words.split())
    assert done.returncode == 2 and "remains 42.70 42.00" in plain(done.stdout)
    assert "error yaml is p.yaml, but no batch of whole groups of 8 is known to fit" in plain(done.stderr)
    assert not (tmp_path / "p.yaml").exists()

    words = "--gpu rtx4090 --prompt-tokens 16 --max-new-tokens 16 --no-kl --batch-size 64 --yaml p.yaml"
    with untraced(1e7):
        done = here("calculate", *words.split(), "--json", "p.json")
    assert done.returncode == 0, done.stderr
    assert "rook-tiny, grpo, bf16, 16 + 16 tokens, groups of 8" in plain(done.stdout)
    stored = json.loads((tmp_path / "p.json").read_text())
    held = {line["name"]: line["bytes"] for line in stored["lines"]}
    weights, size = held["trainable weights"], stored["shares"][1]["batch_size"]
    assert (held["optimizer"], held["gradients"]) == (2 * weights, weights)
    assert held["sampler's copy"] == weights / 2 + 2 * 902 * 256  # a head of its own
    config = parse_command_line(["--config", "p.yaml", "--profile", "rtx4090_dual"])
    assert (config.model, config.batch_size, config.precision) == ("rook-tiny", 2 * size, "bf16")
    assert size > 0 and size % 8 == 0 and config.loss.kl_coef == 0


def test_without_a_hub_the_shape_of_the_usual_model_is_built_in(monkeypatch, logged):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("grpo.model.hub._answers", lambda name: False)
    assert num_parameters(ModelSpec(model="jrahn/RookWorld-LM-124M").config()) == 124_439_808
    assert any("built-in shape of jrahn/RookWorld-LM-124M" in line for line in logged)


def test_switches_that_are_off_say_what_to_type(monkeypatch):
    def found(flags: set[str], dtype: torch.dtype = torch.float32) -> dict:
        monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: flags)
        return {switch.name: (switch.state, switch.remedy) for switch in switches(CPU, dtype)}

    monkeypatch.setattr("grpo.workbench.performance.switches.available_cores", lambda: 96)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    now = found({"amx_bf16"})
    assert now["threads"] == ("off", "export OMP_NUM_THREADS=96")
    assert now["bf16"] == ("off", "--precision bf16")
    assert now["compile"][0] == "off" and now["TF32"][0] == "not here"
    assert now["fused AdamW"][0] == now["fused attention"][0] == "on"
    assert all(bool(remedy) == (state == "off") for state, remedy in now.values())
    assert found({"amx_bf16"}, torch.bfloat16)["bf16"][0] == "on" and found(set())["bf16"][0] == "not here"
    assert "install g++" in no_compiler(CPU)
    monkeypatch.setenv("CXX", sys.executable)  # anything that can be run
    assert no_compiler(CPU) is None


def test_rates_are_of_the_first_way_and_of_others_and_the_command_says_them(monkeypatch):
    machine, threads = look("cpu", "fp32", limit_bytes=2**20), torch.get_num_threads()
    assert (machine.device, machine.precision, machine.usable_bytes) == ("cpu", "fp32", 2**20)
    with monkeypatch.context() as patched:
        patched.setattr("grpo.model.target._cpu_flags", lambda: {"amx_bf16"})
        patched.setattr("grpo.workbench.performance.measure.available_cores", lambda: 2)
        settings = PerformanceSettings(TINY, batch_size=2, steps=1, precision="fp32")
        names = [rate.name for rate in training_rates(settings, CPU)]
    assert names == ["as it is, in fp32", "in bf16", f"with {2 if threads < 2 else 1} threads"]
    assert torch.get_num_threads() == threads
    words = "--arch gpt2 --layers 1 --width 32 --heads 2 --context 32 --steps 1"
    done = here("check", *words.split())
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("tokens/s", "GFLOP/s", "fused AdamW", "off: compile"))
