"""Leaks: growth by hand and on series whose answer is known; kinds, culprits, real loops."""

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
from several_processes import in_processes
from torch import nn

from grpo.memory.leaks.culprits import Culprit, Recorded, Recording, count_tensors
from grpo.memory.leaks.leak import LeakWatch, MemorySample, detect_leak, steady_growth, without_tokens

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


def site_of(marker):
    """The line of this file that ends in a comment."""
    lines = HERE.read_text().splitlines()
    number = next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))
    return f"{HERE.relative_to(Path.cwd())}:{number}"


# ------------------------------------------------------------------------------------ the growth


def is_leak(series, least=4 * MB):
    steady, gained = steady_growth(np.atleast_2d(series), least)
    return (steady & (gained >= least)).tolist()


def test_growth_by_hand():
    # Of 67 steps 61 follow the warm-up; the last 60 are six parts of ten, whose medians rise by 10 on a line.
    steady, gained = steady_growth(np.array([np.arange(67.0)]), 60)
    assert steady.tolist() == [True] and gained == pytest.approx([60])
    # Where every other step has 39 more, the quartiles of a part are 39 apart, and 10 is a quarter of 40.
    for more, steady in (39, True), (41, False):
        noise = np.tile([more, 0.0], 34)[:67]
        assert steady_growth(np.array([np.arange(67.0) + noise]), 60)[0].tolist() == [steady]
    # Each part has to gain half of its share of what is asked for, 10 of 120, and all of them all of it.
    for least, found in (60, (True, True)), (61, (True, False)), (121, (False, False)):
        steady, gained = steady_growth(np.array([np.arange(67.0)]), least)
        assert (steady[0], steady[0] and gained[0] >= least) == found


@pytest.mark.parametrize("name", ["AR(1) 0.8", "plateau", "late jump"])
def test_sound_series_are_no_leak_and_leaks_are_found(name):
    shape = {**SHAPES, **HARDER}[name]
    assert share_found(shape, 5, 0.0, 150, seed=3) <= 0.01
    assert share_found(shape, 80, 0.0, 150, seed=3) <= 0.01
    assert name in HARDER or share_found(shape, 5, 0.5, 150, seed=3) >= 0.95


EXACT = 0.2 * MB * STEPS
JUMP = 300 * MB * (STEPS >= 150)
FILLING = 50 * MB * (1 - np.exp(-STEPS / 15))


def test_series_without_noise():
    steps_up = EXACT + 300 * MB * (STEPS >= 60), EXACT // (4 * MB) * 4 * MB
    hardly_wavers = 2 * MB * STEPS[:60] + MB * 0.2 * np.sin(STEPS[:60] / 8)
    for series in EXACT, EXACT + JUMP, EXACT + FILLING, *steps_up, hardly_wavers:
        assert is_leak(2**32 + series) == [True]
    for series in -EXACT, 0 * STEPS, JUMP, np.minimum(EXACT, EXACT[120]):
        assert is_leak(2**32 + series) == [False]


def test_what_the_tokens_explain_is_taken_out():
    rng = np.random.default_rng(5)
    tokens = 1000 + 10 * STEPS + rng.normal(0, 300, 200)
    # 0.02 MB a token, exactly: nothing is left but the mean.
    assert np.ptp(without_tokens(0.02 * MB * tokens[None], tokens)) < 1
    # Memory that falls with the tokens is not theirs, nor what tokens that never change would explain.
    np.testing.assert_array_equal(without_tokens(-tokens, tokens), -tokens)
    np.testing.assert_array_equal(without_tokens(EXACT, np.full(200, 7.0)), EXACT)
    # Tokens in a line, but for rounding, explain all of a line.
    assert np.ptp(without_tokens(EXACT, np.rint(1000 + 3.3 * STEPS))) < 0.1 * MB
    # A leak that owes nothing to the tokens stays, also where these grow beside it.
    steady = rng.normal(1000, 300, 200)
    assert is_leak(without_tokens(EXACT[None] + 0.02 * MB * steady, steady)) == [True]
    tokens = np.linspace(1000, 3000, 200) * rng.normal(1, 0.1, (100, 200))
    sound = 0.02 * MB * tokens + rng.normal(0, 5 * MB, (100, 200))
    assert sum(is_leak(without_tokens(sound, tokens))) <= 1
    assert sum(is_leak(without_tokens(sound + 0.3 * MB * STEPS, tokens))) > 90


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
        assert rising.bytes_per_step == pytest.approx(MB / 2)
        assert str(verdict) == f"LEAK in 100 steps\n  {kind}: +0.500 MB a step"
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
    assert detect_leak(samples(device=0.05)).leak
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
    look = "(50, 100) float32 on cpu"
    grown = count_tensors() - before
    assert grown[look] == 2 * 50 * 100 * 4 and not any(name.startswith(("(100", "(100,")) for name in grown)
    del views, other, sparse
    assert (count_tensors() - before)[look] == 50 * 100 * 4


def test_a_recording_names_the_line_that_makes_what_stays():
    """Also what only a graph holds, one tensor that grows, and what is not torch's; nothing that passes."""
    kept, losses, state = [], [], {"cache": torch.zeros(1, 8)}
    weight, layer = torch.zeros(7, 3), nn.Linear(4, 6)
    recording = Recording()
    for number in range(4):
        passing = torch.ones(5, 7) @ weight
        kept.append(passing + number)  # makes what is kept
        kept.append(weight.t())
        weight.add_(1)
        state["cache"] = torch.cat([state["cache"], torch.zeros(1, 8)])  # grows a cache
        state["buffer"] = torch.zeros(100)
        losses.append(torch.log_softmax(layer(torch.ones(3, 4)), -1).sum())  # holds the softmax
        kept.append(np.zeros(100_000))  # makes arrays outside torch
        kept.append(json.loads("[" + "1.5, " * 5000 + "1]"))  # makes floats
        passing = np.zeros(100_000)
        recording.boundary()
        del passing
    recorded = recording.stop()
    tensors = {c.site: c for c in recorded.culprits if c.what.startswith("tensors such as")}
    numbers = [("makes what is kept", 15), ("grows a cache", 8), ("holds the softmax", 12 + 18 + 1)]
    sites = {marker: site_of(marker) for marker, _ in numbers}
    assert {site: culprit.num_bytes for site, culprit in tensors.items()} == {
        sites[marker]: 3 * 4 * size for marker, size in numbers
    }
    assert all(culprit.num_steps == 3 for culprit in recorded.culprits)
    assert tensors[sites["grows a cache"]].what == "tensors such as (5, 8) float32 on cpu"
    assert recorded.looks == {f"{shape} float32 on cpu" for shape in [(5, 3), (5, 8), (3, 4), (3, 6), ()]}
    others = {c.site: c.num_bytes for c in recorded.culprits if c.what == "allocations outside torch"}
    arrays, floats = (site_of(marker) for marker in ("makes arrays outside torch", "makes floats"))
    assert others[arrays] == pytest.approx(3 * 800_000, rel=0.01) and others[floats] > 3 * 5000 * 8
    assert max(others, key=others.__getitem__) == arrays
    assert not tracemalloc.is_tracing()
    tracemalloc.start()  # what was on stays on
    assert Recording().stop() == Recorded()
    assert tracemalloc.is_tracing()
    tracemalloc.stop()


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
    with LeakWatch(torch.device("cpu")) as watch:
        for step in range(80):
            kept.append(np.ones(2**18))  # grows an array
            if step % 2:
                kept.append(torch.ones(2**17))
            watch.sample(step)
        return watch.verdict()


def test_growth_that_is_not_torchs_is_named_and_tensors_that_come_now_and_then_by_their_look():
    (ended,) = in_processes(1, grow)
    verdict = ended.value
    assert verdict.kinds == ("held tensors",)  # the arrays are in what the process holds, with the tensors
    assert [growth.bytes_per_step for growth in verdict.growth] == pytest.approx([MB / 4, 2.25 * MB], rel=0.1)
    array, tensors = verdict.culprits
    assert array.site == site_of("grows an array") and array.num_bytes == pytest.approx(3 * 2 * MB, rel=0.01)
    assert tensors == Culprit("tensors (131072,) float32 on cpu", 30 * MB // 2, 60)


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
