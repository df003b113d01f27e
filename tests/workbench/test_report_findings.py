"""What a report concludes from a sweep, from figures worked out by hand."""

from dataclasses import replace

import pytest
from report_folders import GB, sweep_settings, write_sweep

from grpo.workbench.report.findings import (
    best_by_quality,
    best_sentences,
    confound,
    failure_sentences,
    fastest,
    gap,
    memory_sentences,
    seconds_to_reach,
    trade_off,
    within_noise,
)
from grpo.workbench.report.read import Size, Sweep, read_folder
from grpo.workbench.report.trend import Line, causes, fit_line, off_trend, trend_sentences
from grpo.workbench.report.wording import duration, listed, number, rounded
from grpo.workbench.report.worth import worth_section


def sweep_of(*sizes: Size, **settings: object) -> Sweep:
    return Sweep("by hand", sweep_settings() | settings, sizes, "", [])


def ok(batch_size: int, heldout: float, seconds: float, **figures: object) -> Size:
    return Size(
        batch_size, "ok", final_heldout=heldout, seconds=seconds, updates=1000 // batch_size, **figures
    )


# --------------------------------------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.0, "1,234"), (0.5, "0.5"), (2.34567, "2.346"), (3e-4, "3e-4"), (1.25e-5, "1.25e-5"), (0, "0"),
     (31387.4, "31,387"), (-0.25, "-0.25")],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


def test_times_lists_and_large_counts():
    assert [duration(s) for s in (0.0123, 4.25, 59.96, 124, 3900)] == [
        "0.012 s", "4.2 s", "1 min 0 s", "2 min 4 s", "1 h 5 min",
    ]  # fmt: skip
    assert [listed(items) for items in ([], [1], [1, 2], [1, 2, 3])] == ["", "1", "1 and 2", "1, 2 and 3"]
    assert [rounded(count) for count in (512, 1536, 1_997_152)] == ["512", "1.5 k", "2.0 M"]


# ---------------------------------------------------------------------------------------- the best sizes


def test_best_by_quality_by_speed_and_the_trade_off():
    """2.019 is within 1 % of 2.00, 2.03 is not."""
    a, b, c, d = ok(8, 2.00, 100), ok(16, 2.019, 60), ok(32, 2.03, 50), ok(64, 2.50, 40)
    failed = Size(128, "out of memory", final_heldout=1.0, seconds=1.0)
    sweep = sweep_of(a, b, c, d, failed)
    assert (best_by_quality(sweep), fastest(sweep), trade_off(sweep)) == (a, d, b)
    quality, speed, both = best_sentences(sweep)
    assert "size 8 is best: 2.000 nats a token" in quality and "No spread was measured" in quality
    assert "size 64 is best: the same work in 40.0 s, 2.5 times as fast as size 8" in speed
    assert "size 16: 40 % less time than size 8, 0.019 nats a token worse" in both


def test_where_higher_is_better_all_is_the_other_way_round():
    reward = {"quality": {"name": "held-out reward", "better": "higher", "unit": ""}}
    low, high = ok(8, 0.50, 10, final_train=0.6), ok(16, 0.80, 20, final_train=0.7)
    sweep = sweep_of(low, high, **reward)
    assert best_by_quality(sweep) is high and trade_off(sweep) is high
    assert gap(low, sweep) == pytest.approx(0.1) and gap(high, sweep) == pytest.approx(-0.1)


def test_noise_is_two_standard_errors_of_a_difference():
    """1.96 · √(0.003² + 0.004²) = 0.0098."""
    best = ok(8, 2.0, 9, heldout_stderr=0.003)
    inside, outside = ok(16, 2.0097, 9, heldout_stderr=0.004), ok(32, 2.0099, 9, heldout_stderr=0.004)
    unknown = ok(64, 2.0, 9)
    sweep = sweep_of(best, inside, outside, unknown)
    assert within_noise(sweep, best) == [inside]
    assert "Size 16 is within the noise" in best_sentences(sweep)[0]


def test_within_noise_the_faster_size_is_the_trade_off():
    best, close = ok(8, 2.0, 90, heldout_stderr=0.1), ok(16, 2.2, 50, heldout_stderr=0.1)
    assert trade_off(sweep_of(best, close)) is close
    assert trade_off(sweep_of(best, replace(close, heldout_stderr=None))) is best


def test_time_to_a_quality_is_the_first_point_at_least_as_good():
    curve = [{"seconds": s, "heldout": h} for s, h in ((0, 5.0), (10, 3.0), (20, None), (30, 2.0), (40, 2.5))]
    size = ok(8, 2.5, 40, curve=curve)
    sweep = sweep_of(size)
    assert [seconds_to_reach(sweep, size, quality) for quality in (3.0, 2.9, 1.0)] == [10, 30, None]


# ------------------------------------------------------------------------------------ the trend of time


def test_one_wild_point_does_not_move_the_line():
    assert fit_line([1, 2, 4, 8, 16], [3, 5, 99, 17, 33]) == Line(1, 2)
    falling = fit_line([1, 2, 4], [4, 3, 2])
    assert falling.start >= 0 and falling.slope >= 0


def timed(batch_size: int, seconds_per_update: float, **figures: object) -> Size:
    updates = 1024 // batch_size
    return Size(batch_size, "ok", updates=updates, seconds=updates * seconds_per_update, **figures)


def test_a_size_off_the_trend_is_named_with_its_factor():
    sweep = sweep_of(timed(8, 1.8), timed(16, 2.6), timed(32, 4.2), timed(64, 14.8), timed(128, 13.8))
    ((size, factor),) = off_trend(sweep)  # the line: 1 + 0.1 for each row, 7.4 at 64
    assert size.batch_size == 64 and factor == pytest.approx(2)
    assert "Size 64 does not fit: it takes 2.0 times what the line says. No cause of that was measured." in (
        trend_sentences(sweep)
    )
    assert "too few for a trend" in trend_sentences(sweep_of(timed(8, 1.0), timed(16, 2.0)))[0]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        pytest.param({"compile_s": 90.0}, "compiling took 1 min 30 s of its 3 min 20 s, and", id="compile"),
        pytest.param({"compile_s": 60.0}, "compiling took 1 min 0 s of its 3 min 20 s", id="compile in part"),
        pytest.param({"compile_s": 40.0}, None, id="little compiling"),
        pytest.param({"peak_bytes": 3.9 * GB}, "memory peaked at 98 % of the 4.00 GB usable", id="full"),
        pytest.param({"peak_bytes": 3.0 * GB}, None, id="room left"),
        pytest.param({"page_faults_major": 5000.0}, "5,000 major page faults", id="page faults"),
        pytest.param({"page_faults_major": 5.0}, None, id="few page faults"),
    ],
)  # fmt: skip
def test_causes_are_those_that_were_measured(figures, words):
    """200 s where 100 s are expected."""
    size = Size(64, "ok", seconds=200.0, **figures)
    found = causes(sweep_of(size), size, 100.0)
    assert [text.startswith(words) for text in found] == ([True] if words else [])
    assert not found or ("without it" in found[0]) == (figures.get("compile_s") == 90.0)


def test_without_compiling_nothing_is_said_to_compile():
    size = Size(64, "ok", seconds=200.0, compile_s=90.0)
    (found,) = causes(sweep_of(size, compile=False), size, 100.0)
    assert found.startswith("getting started took 1 min 30 s of its 3 min 20 s")


# ------------------------------------------------------------------------------------------ what to mind


def test_predicted_memory_is_held_against_what_was_measured():
    """10 % too high and within its error of 0.1 GB; 20 % too low and outside it."""
    high = Size(8, "ok", predicted_bytes=1.1 * GB, peak_bytes=GB, predicted_error_bytes=0.11 * GB)
    low = Size(16, "ok", predicted_bytes=1.6 * GB, peak_bytes=2 * GB, predicted_error_bytes=0.1 * GB)
    (said,) = memory_sentences(sweep_of(high, low))
    assert said == (
        "Predicted peaks are within 20 % of those measured, the furthest at size 16 (too low); 1 of 2 are "
        "within their stated error."
    )


@pytest.mark.parametrize(
    ("scale_lr", "words"),
    [
        ("none", "the same at every size (3e-4) and was not tuned"),
        ("linear", "in proportion to the batch size and was not tuned"),
        ("sqrt", "the square root of the batch size and was not tuned"),
        ("tuned", "tuned at each size, so that differences of quality are those of the size."),
        (None, "is not known"),
    ],
)
def test_the_confound_is_named_unless_the_rate_was_tuned(scale_lr, words):
    assert words in confound(sweep_of(scale_lr=scale_lr))


def test_a_best_rate_at_the_edge_of_those_tried_is_named():
    tried = [(1e-4, 2.0), (3e-4, 1.9), (1e-3, 1.8)]
    edge, inside = (
        Size(8, "ok", learning_rate=1e-3, tuned=tried),
        Size(16, "ok", learning_rate=3e-4, tuned=tried),
    )
    assert "At size 8 the best rate" in confound(sweep_of(edge, inside, scale_lr="tuned"))


def test_what_ran_out_of_memory_has_its_budget(tmp_path):
    """512 rows of 7 MB and of 2 MB, 56 MB, and a quarter of a GB: 4.80 GB, of which 3.5 are 73 %."""
    sweep = read_folder(write_sweep(tmp_path / "sweep"))
    (said,) = failure_sentences(sweep)
    assert said.startswith("Size 512: out of memory (DefaultCPUAllocator: can't allocate memory).")
    assert "4.80 GB of 4.00 GB usable, most of it for activations (3.50 GB, 73 %)" in said


def test_which_batch_gets_on_fastest_is_predicted_and_measured(tmp_path):
    """Noise 96, their median; size 16 has 16 / 112 of signal in (1,024 * 0.084 + 2) / 1,024 s, and so on."""
    sweep = read_folder(write_sweep(tmp_path / "sweep"))
    section = worth_section(sweep)
    (sentence,), (table,) = section.sentences, section.tables
    assert "about 96 rows" in sentence
    assert "in the order 16, 32, 64, 256 and 128; measured it is 64, 32, 16, 256 and 128" in sentence
    by_size = {row[0]: row for row in table.rows}
    assert by_size["16"][1:4] == ("14 %", "100 %", "1") and by_size["64"][5] == "1"
    assert "512" not in by_size  # it ran out of memory
    silent = replace(sweep, sizes=[replace(size, noise_scale=None) for size in sweep.sizes])
    assert worth_section(silent).empty
