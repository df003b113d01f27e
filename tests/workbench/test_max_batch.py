"""Finding the largest batch: the search, the trials, and the command as people type it."""

import json
import shlex
import sys

import pytest
from commands import ROOT, fresh, run

from grpo.config import SettingsError, parse_command_line
from grpo.memory.phase import Footprint
from grpo.workbench.maximum.find import (
    check,
    findings,
    findings_elsewhere,
    train_lean_flags,
    why_no_command,
)
from grpo.workbench.maximum.search import (
    TrialResult,
    classic_sizes,
    correction,
    predicted_sizes,
    run_search,
    try_size,
)
from grpo.workbench.maximum.settings import FindSettings
from grpo.workbench.maximum.trial import TrialTask
from grpo.workbench.spec import ModelSpec

FIND = "scripts/find_max_batch_size.py"
TINY = ModelSpec(arch="gpt2", layers=1, width=32, heads=2, context=32)


class Line:
    """A memory model: so many bytes a row, wrong by a factor."""

    def __init__(self, bytes_per_row, multiple=1):
        self.bytes_per_row, self.multiple = bytes_per_row, multiple

    def largest_phase(self, batch_size):
        return "learn", Footprint({"activations": self.bytes_per_row * batch_size})

    def largest_batch(self, usable_bytes, *, at_most, with_error):
        size = int(min(at_most, usable_bytes / self.bytes_per_row))
        return max(0, size // self.multiple * self.multiple)


def device(room, bytes_per_row=10.0, overhead=0.0):
    """What a trial finds on a device of `room` bytes."""

    def attempt(size, before):
        peak = overhead + bytes_per_row * size
        if peak > room:
            return TrialResult(size, "out of memory")
        return TrialResult(size, "ok", peak_bytes=peak, losses=[1.0], step_s=[1.0])

    return attempt


def sizes(results):
    return [result.batch_size for result in results]


def largest(results):
    return max((result.batch_size for result in results if result.fits), default=0)


def test_classic_adds_sixteen_until_memory_runs_out():
    results = run_search(classic_sizes(64, multiple=1, at_most=1024), device(1000))
    assert sizes(results) == [64, 80, 96, 112] and largest(results) == 96


def test_classic_halves_until_it_fits_and_does_not_try_a_failure_again():
    results = run_search(classic_sizes(64, multiple=8, at_most=1024), device(250))
    assert sizes(results) == [64, 32, 16, 32][:3] and largest(results) == 16
    assert sizes(run_search(classic_sizes(64, multiple=8, at_most=1024), device(50))) == [64, 32, 16, 8]


def test_classic_stops_at_the_most_it_may_use():
    results = run_search(classic_sizes(64, multiple=8, at_most=90), device(10_000))
    assert sizes(results)[-1] == 90 and largest(results) == 90


@pytest.mark.parametrize("believed", [8.0, 10.0, 13.0])
def test_predict_comes_close_within_four_trials(believed):
    room, overhead = 10_000, 700.0
    search = predicted_sizes(Line(believed), room, start=64, multiple=1, at_most=4096)
    results = run_search(search, device(room, overhead=overhead))
    assert len(results) <= 4
    assert largest(results) >= 0.97 * 930


def test_predict_keeps_groups_whole_and_never_repeats_a_size():
    search = predicted_sizes(Line(9.0, multiple=8), 5000, start=60, multiple=8, at_most=1024)
    results = run_search(search, device(5000, overhead=300.0))
    assert all(size % 8 == 0 for size in sizes(results))
    assert len(set(sizes(results))) == len(results)


def test_predict_shows_the_line_with_a_third_size_where_trials_are_left():
    search = predicted_sizes(Line(10.0), 1000, start=64, multiple=1, at_most=1024)
    assert sizes(run_search(search, device(1000))) == [64, 100, 82]
    search = predicted_sizes(Line(10.0, multiple=8), 1000, start=64, multiple=8, at_most=72)
    assert sizes(run_search(search, device(1000))) == [64, 72, 32]


def test_predict_goes_down_when_even_the_first_size_fails():
    search = predicted_sizes(Line(2.0), 1000, start=64, multiple=1, at_most=1024)
    results = run_search(search, device(1000, bytes_per_row=40.0))
    assert sizes(results)[:3] == [64, 32, 16] and 16 <= largest(results) <= 25


def test_predictions_are_corrected_by_what_was_measured():
    results = [
        TrialResult(8, "ok", peak_bytes=100),
        TrialResult(16, "ok", peak_bytes=190),
        TrialResult(32, "out of memory"),
    ]
    assert correction(Line(10.0), results[2:]) == (1.0, 0.0)
    assert correction(Line(10.0), results[:1]) == (1.0, 20.0)
    factor, offset = correction(Line(10.0), results)  # 80 and 160 bytes were predicted
    assert factor == pytest.approx(90 / 80) and offset == pytest.approx(10.0)
    assert correction(Line(1.0), results[:2]) == (1.5, 190 - 1.5 * 16)


# ----------------------------------------------------------------------------------------- trials


def task(**changes):
    given = {
        "objective": "lm", "model": vars(TINY), "batch_size": 4, "device": "cpu", "precision": "fp32",
        "prompt_tokens": 8, "new_tokens": 32, "data": str(ROOT / "README.md"),
    }  # fmt: skip
    return TrialTask(**{**given, **changes})


def test_a_trial_runs_out_of_a_real_limit_and_says_so():
    if sys.platform != "linux":
        pytest.skip("the limit is enforced on Linux")
    result = try_size(task(batch_size=200_000, memory_limit_bytes=1200 * 2**20))
    assert result.status == "out of memory" and result.peak_bytes is None


def test_a_trial_that_cannot_work_is_no_matter_of_memory():
    result = try_size(task(data="nowhere.txt"))
    assert result.status == "failed" and "nowhere.txt" in result.message
    with pytest.raises(ValueError, match="not for want of memory"):
        findings(
            FindSettings(model=TINY),
            check(FindSettings(model=TINY, max_new_tokens=8, prompt_tokens=8)),
            [result],
        )


def test_where_nothing_fits_the_error_says_what_one_group_needs():
    settings = FindSettings(model=TINY, objective="lm", data=str(ROOT / "README.md"), device="cpu")
    with pytest.raises(ValueError, match=r"not even a batch of 4 fits.*weights .*--gradient-checkpointing"):
        findings(settings, check(settings), [TrialResult(4, "out of memory")])


# ---------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "given, message",
    [
        ({"start": 0}, "start is 0: give at least 1"),
        ({"group_size": 1}, "group_size is 1"),
        ({"max_batch_size": 4}, "less than one group of 8"),
        ({"memory_limit": "much"}, "memory_limit is 'much'"),
        ({"measured": ("64=1GB",)}, "measured and device_memory belong together"),
    ],
)
def test_settings_that_cannot_be(given, message):
    with pytest.raises(SettingsError, match=message):
        FindSettings(**given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"objective": "lm"}, "give --data FILE"),
        ({"objective": "lm", "data": "nowhere.txt"}, "'nowhere.txt', which is no file"),
        ({"prompt_tokens": 30, "max_new_tokens": 30}, "reaches 32 tokens"),
    ],
)
def test_checks_come_before_any_trial(given, message):
    with pytest.raises(ValueError, match=message):
        check(FindSettings(model=TINY, device="cpu", **given))


def test_measured_elsewhere():
    settings = FindSettings(measured=("64=14.8GB", "80=18.08GB", "208=oom"), device_memory="47.4GB")
    found = findings_elsewhere(settings)
    assert found.maximum == 80 and found.failed == [208] and "elsewhere" in (found.no_command or "")
    for wrong in (("64", "80=1GB"), ("x=1GB", "80=1GB"), ("64=1GB", "80=oom")):
        with pytest.raises(ValueError, match=r"measured has|no size"):
            findings_elsewhere(FindSettings(measured=wrong, device_memory="47.4GB"))


# --------------------------------------------------------------------------- what is recommended


def test_the_command_names_every_setting_that_train_lean_has_otherwise():
    assert train_lean_flags(FindSettings()) == " --model rook-tiny"
    settings = FindSettings(
        model=ModelSpec(model="my models/a"), group_size=4, max_new_tokens=16, kl=False, lora_rank=4,
        gradient_checkpointing="full", device="cuda:1", precision="bf16", memory_limit="800MB",
    )  # fmt: skip
    flags = train_lean_flags(settings)
    config = parse_command_line(["--batch-size", "8", *shlex.split(flags)])
    assert (config.model, config.group_size, config.sampling.max_new_tokens) == ("my models/a", 4, 16)
    assert (config.uses_reference, config.lora.lora_rank, config.gradient_checkpointing) == (False, 4, "full")
    assert (config.device, config.precision, config.memory_limit) == ("cuda:1", "bf16", "800MB")


@pytest.mark.parametrize(
    "given, reason",
    [
        ({}, None),
        ({"prompt_tokens": 16}, "up to 59 tokens, and this is --prompt-tokens 16; give --prompt-tokens 59"),
        ({"objective": "lm"}, "language modelling"),
        ({"model": TINY}, "no model made by --arch"),
    ],
)
def test_what_train_lean_cannot_do_has_no_command(given, reason):
    said = why_no_command(FindSettings(**given))
    assert said is None if reason is None else reason in said


# ---------------------------------------------------------------------------------------- commands


def test_the_command_finds_tabulates_and_draws(tmp_path):
    done = fresh(  # what the process holds is part of what is predicted
        FIND, "--objective", "lm", "--data", ROOT / "README.md", "--device", "cpu", "--arch", "gpt2",
        "--layers", 1, "--width", 32, "--heads", 2, "--context", 32,
        "--start", 8, "--max-batch-size", 8, "--output", "out", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Before the first trial" in done.stdout and "Largest batch that fitted: 8" in done.stdout
    found = json.loads((tmp_path / "out" / "max_batch.json").read_text())
    assert found["maximum"] == 8
    assert [trial["batch_size"] for trial in found["trials"]] == [8, 4]
    for trial in found["trials"]:
        assert trial["status"] == "ok" and len(trial["losses"]) == 3
        assert trial["predicted_bytes"] == pytest.approx(trial["peak_bytes"], rel=0.25)
    assert (tmp_path / "out" / "max_batch.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_what_is_wrong(tmp_path):
    done = run(FIND, "--objective", "lm", cwd=tmp_path)
    assert done.returncode == 2 and "give --data FILE" in done.stdout
    assert not list(tmp_path.iterdir())
