"""Leaks: trends against numbers by hand, scipy and series whose answer is known; kinds, culprits."""

import gc
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from leak_series import HARDER, SHAPES, share_found
from leak_trials import line_of, train
from scipy.stats import norm, rankdata, theilslopes
from several_processes import in_processes
from torch import nn

from grpo.memory.leaks import trend
from grpo.memory.leaks.census import Group, Held, count_tensors, grown_tensors
from grpo.memory.leaks.culprits import name_culprits
from grpo.memory.leaks.leak import LeakWatch, MemorySample, detect_leak
from grpo.memory.leaks.recording import AllocationRecord, CreationRecord, Recorded, Recording
from grpo.memory.leaks.trend import find_trends, without_covariate

MB = 2**20
HERE = Path(__file__)
STEPS = np.arange(200.0)


@pytest.fixture(autouse=True)
def only_new_objects():
    """A census is of what comes after, as in a run."""
    gc.freeze()
    yield
    gc.enable()
    gc.unfreeze()


def line(marker):
    """The line of this file that ends in a comment."""
    lines = HERE.read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))


# ------------------------------------------------------------------------------------- the trend


def noise(num, *, seed=0, steps=200):
    return np.random.default_rng(seed).normal(0, 5 * MB, (num, steps))


def found(values, **options):
    values = np.atleast_2d(values)
    return find_trends(values, np.arange(values.shape[1], dtype=float), **options)


def test_statistic_slope_interval_ranks_and_p_value_by_hand_and_by_scipy():
    # Of four points 4 * 3 * 13 / 18; autocorrelation, lag 1 alone: 1 + 2 / (4 * 3 * 2) * (3 * 2 * 1) * 0.6.
    assert trend.kendall_variance(4, np.array([0.6]))[0] == pytest.approx(26 / 3 * 1.3)
    steps = np.cumsum(np.random.default_rng(1).integers(1, 4, 50)).astype(float)  # steps may be missing
    series = noise(4, steps=50) + 0.1 * MB * steps
    slopes = np.sort(trend.pair_slopes(series, steps))
    slope, low, high = trend.theil_sen(slopes, trend.kendall_variance(50, np.zeros(1)))
    for row, values in enumerate(series):
        expected = theilslopes(values, steps)
        assert [slope[row], low[row], high[row]] == pytest.approx([expected[0], *expected[2:]])
    values = np.random.default_rng(0).integers(0, 20, (5, 40)).astype(float)
    np.testing.assert_array_equal(trend.mean_ranks(values), rankdata(values, axis=1))
    # 36 of 40 points of a line are past the warm-up: all 630 pairs rise, and there is no noise.
    z = (630 - 1) / np.sqrt(36 * 35 * 77 / 18)
    assert found(0.5 * MB * np.arange(40.0)).p_value[0] == pytest.approx(norm.sf(z), rel=1e-6)


@pytest.mark.parametrize("name", ["AR(1) 0.8", "plateau"])
def test_sound_series_are_no_leak_and_leaks_are_found(name):
    assert share_found(SHAPES[name], 5, 0.0, 150, seed=3) <= 0.02
    assert share_found(SHAPES[name], 80, 0.0, 150, seed=3) <= 0.02
    assert share_found(SHAPES[name], 5, 0.3, 150, seed=3) >= 0.95


def test_one_late_jump_is_no_leak():
    assert share_found(HARDER["late jump"], 5, 0.0, 150, seed=3) <= 0.02


EXACT = 0.2 * MB * STEPS
JUMP = 300 * MB * (STEPS >= 150)
FILLING = 50 * MB * (1 - np.exp(-STEPS / 15))


def test_series_without_noise():
    steps_up = EXACT + 300 * MB * (STEPS >= 60), EXACT // (4 * MB) * 4 * MB
    hardly_wavers = 2 * MB * STEPS[:60] + MB * 0.2 * np.sin(STEPS[:60] / 8)
    for series in EXACT, EXACT + JUMP, EXACT + FILLING, *steps_up, hardly_wavers:
        assert found(2**32 + series, min_growth=4 * MB).rising[0]
    for series in -EXACT, 0 * STEPS, JUMP, np.minimum(EXACT, EXACT[120]):
        assert not found(2**32 + series, min_growth=4 * MB).rising[0]


def test_the_slope_is_told_with_an_interval_that_holds_it():
    trends = found(noise(300, seed=4) + 0.25 * MB * STEPS)
    covered = (trends.low <= 0.25 * MB) & (trends.high >= 0.25 * MB)
    assert 0.91 <= covered.mean() <= 0.985
    # An early jump does not touch the slope: it is the second half's.
    assert found(EXACT + 300 * MB * (STEPS >= 60)).slope[0] == pytest.approx(0.2 * MB)
    # 180 steps follow the warm-up, 179 intervals: 35.8 MB.
    assert found(EXACT, min_growth=35.7 * MB).rising[0]
    assert not found(EXACT, min_growth=35.9 * MB).rising[0]
    rising = found(noise(2, steps=5000) + np.array([[0.0], [0.05]]) * MB * np.arange(5000.0))  # averaged
    assert list(rising.rising) == [False, True] and rising.slope[1] == pytest.approx(0.05 * MB, rel=0.05)


def test_what_the_tokens_explain_is_taken_out():
    rng = np.random.default_rng(5)
    tokens = 1000 + 10 * STEPS + rng.normal(0, 300, 200)
    # 0.02 MB a token, exactly: nothing is left but the mean.
    assert np.ptp(without_covariate(0.02 * MB * tokens, tokens)) < 1
    # Memory that falls with the tokens is not theirs, nor what tokens that never change would explain.
    np.testing.assert_array_equal(without_covariate(-tokens, tokens), -tokens)
    np.testing.assert_array_equal(without_covariate(EXACT, np.full(200, 7.0)), EXACT)
    # A leak that owes nothing to the tokens stays, also where these grow beside it.
    steady = rng.normal(1000, 300, 200)
    assert found(without_covariate(EXACT + 0.02 * MB * steady, steady)).rising[0]
    tokens = np.linspace(1000, 3000, 200) * rng.normal(1, 0.1, (100, 200))
    sound = 0.02 * MB * tokens + rng.normal(0, 5 * MB, (100, 200))
    assert found(without_covariate(sound, tokens)).rising.sum() <= 1
    assert found(without_covariate(sound + 0.3 * MB * STEPS, tokens)).rising.mean() > 0.9


# ----------------------------------------------------------------------------------- the verdict


def samples(num=100, *, allocated=0.0, reserved=0.0, device=0.0, tokens=None):
    """Readings that grow by so many MB a step; each kind holds those before it."""
    rates = (100, device), (10, allocated), (50, reserved)
    return [
        MemorySample(
            step,
            *(int((least + rate * step) * MB) for least, rate in rates),
            tokens=None if tokens is None else int(tokens[step]),
        )
        for step in range(num)
    ]


def test_what_rises_tells_the_kind_and_what_nobody_counted_has_none():
    kinds = {"allocated": "held tensors", "reserved": "fragmentation", "device": "not torch"}
    for first, (counted, kind) in enumerate(kinds.items()):
        verdict = detect_leak(samples(**dict.fromkeys([*kinds][first:], 0.5)))
        assert verdict.leak and verdict.kinds == (kind,), counted
        (rising,) = (each for each in verdict.growth if each.leak)
        assert [rising.bytes_per_step, rising.low, rising.high] == pytest.approx([MB / 2] * 3)
        assert rising.p_value < 1e-6
        said = f"{kind}: +0.500 MB a step (95 % interval +0.500 to +0.500"
        assert str(verdict).startswith("LEAK in 100 steps\n") and said in str(verdict)
        stored = json.loads(json.dumps(verdict.to_dict()))
        assert stored["leak"] is True and stored["kinds"] == [kind] and stored["num_steps"] == 100
    host = [replace(sample, reserved_bytes=None) for sample in samples(allocated=0.5, device=0.5)]
    assert [each.kind for each in detect_leak(host).growth] == ["held tensors", "not torch"]
    uncounted = [replace(sample, allocated_bytes=None) for sample in samples(device=0.5)]
    assert detect_leak(uncounted).kinds == ("memory of unknown kind",)


def test_steady_memory_small_growth_short_runs_and_what_follows_the_tokens_are_no_leak():
    steady = detect_leak(samples())
    assert not steady.leak and str(steady).startswith("no leak in 100 steps")
    assert [each.kind for each in steady.growth] == ["held tensors", "fragmentation", "not torch"]
    small = detect_leak(samples(device=0.01))  # 0.9 MB after the warm-up
    assert not small.leak and "MB in all, and up to 4 MB a run may settle by" in str(small)
    assert detect_leak(samples(device=0.01), min_growth_bytes=MB // 2).leak
    short = detect_leak(samples(39, device=1.0))
    assert not short.leak and "a trend needs 40" in str(short)
    tokens = 1000 + 20 * np.arange(100) + np.random.default_rng(0).normal(0, 300, 100)
    following = [
        replace(sample, device_used_bytes=int(100 * MB + sample.tokens * 20_000))
        for sample in samples(tokens=tokens)
    ]
    verdict = detect_leak(following)
    assert not verdict.leak and verdict.follows_tokens and "grew with the tokens" in str(verdict)
    blind = detect_leak([replace(sample, tokens=None) for sample in following])
    assert blind.leak and not blind.follows_tokens
    # A heap may settle for 3 % of 1,000 MB, while the tensors stay as they are; a card is counted exactly.
    for rate, kinds in (0.2, ()), (0.5, ("not torch",)):
        host = [MemorySample(step, int((1000 + rate * step) * MB), 10 * MB) for step in range(100)]
        assert detect_leak(host).kinds == kinds
        assert detect_leak(samples(device=rate)).kinds == ("not torch",)


# ---------------------------------------------------------------------------------- the culprits


def test_a_census_counts_storages_once():
    before = count_tensors()
    base = torch.zeros(50, 100)
    views = [base[row] for row in range(50)], base.t(), base.detach()
    other = torch.zeros(50, 100)
    sparse = base.to_sparse()
    grown = grown_tensors(before, count_tensors())
    assert grown[Group((50, 100), "float32", "cpu")] == Held(2, 2 * 50 * 100 * 4)
    assert not any(group.shape in ((100,), (100, 50)) for group in grown)
    del views, other, sparse
    assert grown_tensors(before, count_tensors())[Group((50, 100), "float32", "cpu")].num_tensors == 1


def test_a_record_names_the_line_that_makes_what_stays():
    """Also what only a graph holds, and one tensor that grows; neither what passes nor what is replaced."""
    kept, losses, state = [], [], {"cache": torch.zeros(1, 8)}
    weight, layer = torch.zeros(7, 3), nn.Linear(4, 6)
    with CreationRecord() as record:
        for number in range(4):
            passing = torch.ones(5, 7) @ weight
            kept.append(passing + number)  # makes what is kept
            kept.append(weight.t())
            weight.add_(1)
            state["cache"] = torch.cat([state["cache"], torch.zeros(1, 8)])  # grows a cache
            state["buffer"] = torch.zeros(100)
            losses.append(torch.log_softmax(layer(torch.ones(3, 4)), -1).sum())  # holds the softmax
            record.boundary()
    numbers = [("makes what is kept", (5, 3), 15), ("grows a cache", (5, 8), 8)]
    numbers += [("holds the softmax", (3, 4), 12), ("holds the softmax", (3, 6), 18)]
    numbers += [("holds the softmax", (), 1)]
    assert record.culprits() == {
        (f"{HERE}:{line(marker)}", Group(shape, "float32", "cpu")): 3 * 4 * size
        for marker, shape, size in numbers
    }


def test_allocations_outside_torch_are_named():
    kept = []
    record = AllocationRecord()
    record.start()
    for _ in range(4):
        kept.append(np.zeros(100_000))  # makes arrays outside torch
        kept.append(json.loads("[" + "1.5, " * 5000 + "1]"))  # makes floats
        passing = np.zeros(100_000)
        record.boundary()
        del passing
    record.stop()
    culprits = record.culprits()
    arrays = f"{HERE}:{line('makes arrays outside torch')}"
    assert culprits[arrays] == pytest.approx(3 * 800_000, rel=0.01)
    assert culprits[f"{HERE}:{line('makes floats')}"] > 3 * 5000 * 8
    assert max(culprits, key=culprits.__getitem__) == arrays
    assert not tracemalloc.is_tracing()
    tracemalloc.start()  # what was on stays on
    recording = Recording()
    recording.boundary()
    recording.stop()
    assert tracemalloc.is_tracing()
    tracemalloc.stop()


def test_census_and_record_are_joined():
    fixed, vary = Group((8, 16), "float32", "cpu"), Group((99,), "float32", "cpu")
    tensors = {("a.py:1", fixed): 300, ("b.py:2", fixed): 300, ("c.py:3", vary): 900}
    seen = Recorded(3, tensors, {"d.py:4": 90})
    culprits = name_culprits({fixed: Held(40, 4000), vary: Held(1, 300)}, 20, seen)
    assert [str(each).replace("0.0 MB", "") for each in culprits] == [
        "tensors such as (99,) float32 on cpu,  in 3 steps, created at c.py:3",
        "40 tensors (8, 16) float32 on cpu,  in 20 steps, created at a.py:1 and b.py:2",
        "allocations outside torch,  in 3 steps, created at d.py:4",
        "1 tensors (99,) float32 on cpu,  in 20 steps",
    ]


# ------------------------------------------------------------------------------------- real loops


@pytest.mark.parametrize("leak", ["logits", "cycle", "none"])
def test_a_real_leak_is_found_and_named_and_a_sound_loop_is_clean(leak):
    verdict = train(leak, seed=0, steps=60)
    if leak == "none":
        assert not verdict.leak and verdict.culprits == () and verdict.growth[0].bytes_per_step == 0
        return
    assert verdict.kinds == ("held tensors",)
    assert verdict.culprits[0].site == f"tests/leak_trials.py:{line_of(leak)}"


def grow(rank):
    """The verdict of a process of its own, whose heap has no gaps that earlier tests left."""
    kept = []
    gc.freeze()
    with LeakWatch(torch.device("cpu"), count=rank == 0) as watch:
        for step in range(80):
            if rank == 0:
                kept.append(np.ones(2**18))  # grows an array
            else:
                kept.append(torch.ones(2**19))  # grows a tensor
            watch.sample(step)
        return watch.verdict().to_dict()


def test_growth_that_is_not_torchs_is_named_and_a_watch_that_does_not_count_knows_no_kind():
    counted, uncounted = (ended.value for ended in in_processes(2, grow))
    assert counted["kinds"] == ["not torch"] and uncounted["kinds"] == ["memory of unknown kind"]
    for verdict, marker in ((counted, "grows an array"), (uncounted, "grows a tensor")):
        assert verdict["culprits"][0]["site"].endswith(f"{HERE.name}:{line(marker)}")
        (growth,) = (each for each in verdict["growth"] if each["leak"])
        assert growth["bytes_per_step"] == pytest.approx(2 * MB, rel=0.1)


def test_a_watch_that_is_left_early_records_no_more():
    kept = []
    with pytest.raises(KeyError), LeakWatch(torch.device("cpu")) as watch:
        for step in range(41):
            kept.append(torch.ones(MB // 2))
            watch.sample(step)
        assert tracemalloc.is_tracing()
        raise KeyError
    assert not tracemalloc.is_tracing()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
