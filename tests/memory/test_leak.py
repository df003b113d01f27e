import gc
import json
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.leak_trials import LEAKS, line_of, train
from torch import nn

from grpo.memory.leaks.census import Group, Held, count_tensors, grown_tensors
from grpo.memory.leaks.culprits import name_culprits
from grpo.memory.leaks.leak import LeakWatch, MemorySample, detect_leak
from grpo.memory.leaks.recording import AllocationRecord, CreationRecord, Recorded, Recording, piling_up

MB = 2**20
HERE = Path(__file__)


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


def samples(num=100, *, allocated=0.0, reserved=0.0, device=0.0, tokens=None):
    """Readings that grow by so many MB a step; each kind holds those before it."""
    return [
        MemorySample(
            step,
            device_used_bytes=int((100 + device * step) * MB),
            allocated_bytes=int((10 + allocated * step) * MB),
            reserved_bytes=int((50 + reserved * step) * MB),
            tokens=None if tokens is None else int(tokens[step]),
        )
        for step in range(num)
    ]


@pytest.mark.parametrize(
    ("growth", "kind"),
    [
        ({"allocated": 0.5, "reserved": 0.5, "device": 0.5}, "held tensors"),
        ({"reserved": 0.5, "device": 0.5}, "fragmentation"),
        ({"device": 0.5}, "not torch"),
    ],
)
def test_what_rises_tells_the_kind(growth, kind):
    verdict = detect_leak(samples(**growth))
    assert verdict.leak and verdict.kinds == (kind,)
    (found,) = (each for each in verdict.growth if each.leak)
    assert [found.bytes_per_step, found.low, found.high] == pytest.approx([MB / 2] * 3)
    assert found.p_value < 1e-6
    assert str(verdict).startswith("LEAK in 100 steps\n")
    assert f"{kind}: +0.500 MB a step (95 % interval +0.500 to +0.500" in str(verdict)


def test_steady_memory_is_no_leak_and_what_nobody_counted_has_no_kind():
    steady = detect_leak(samples())
    assert not steady.leak and str(steady).startswith("no leak in 100 steps")
    assert [each.kind for each in steady.growth] == ["held tensors", "fragmentation", "not torch"]
    host = [replace(sample, reserved_bytes=None) for sample in samples(allocated=0.5, device=0.5)]
    assert [each.kind for each in detect_leak(host).growth] == ["held tensors", "not torch"]
    uncounted = [replace(sample, allocated_bytes=None) for sample in samples(device=0.5)]
    assert detect_leak(uncounted).kinds == ("memory of unknown kind",)


def test_a_verdict_is_json():
    verdict = json.loads(json.dumps(detect_leak(samples(device=0.5)).to_dict()))
    assert verdict["leak"] is True and verdict["kinds"] == ["not torch"] and verdict["num_steps"] == 100
    assert verdict["growth"][2]["bytes_per_step"] == pytest.approx(MB / 2)


def test_growth_that_follows_the_tokens_is_no_leak():
    tokens = 1000 + 20 * np.arange(100) + np.random.default_rng(0).normal(0, 300, 100)
    following = [
        replace(sample, device_used_bytes=int(100 * MB + sample.tokens * 20_000))
        for sample in samples(tokens=tokens)
    ]
    verdict = detect_leak(following)
    assert not verdict.leak and verdict.follows_tokens and "grew with the tokens" in str(verdict)
    blind = detect_leak([replace(sample, tokens=None) for sample in following])
    assert blind.leak and not blind.follows_tokens


def test_small_growth_and_short_runs():
    small = detect_leak(samples(device=0.01))  # 0.9 MB after the warm-up
    assert not small.leak and "MB in all, and up to 4 MB a run may settle by" in str(small)
    assert detect_leak(samples(device=0.01), min_growth_bytes=MB // 2).leak
    short = detect_leak(samples(39, device=1.0))
    assert not short.leak and "a trend needs 40" in str(short)


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


def test_what_piles_up_holds_more_at_every_boundary():
    boundaries = [{"a": 1, "b": 5, "c": 1}, {"a": 2, "b": 5, "c": 3}, {"a": 4, "b": 6, "c": 2, "d": 9}]
    assert piling_up(boundaries) == {"a": 3}


def recorded(steps, num=4):
    """Culprits of a function of the step that makes and keeps what it likes."""
    record = CreationRecord()
    with record:
        for step in range(num):
            steps(step)
            record.boundary()
    return record.culprits()


def test_a_record_names_the_line_that_makes_what_stays():
    kept = []
    weight = torch.zeros(7, 3)

    def step(number):
        passing = torch.ones(5, 7) @ weight
        kept.append(passing + number)  # makes what is kept
        kept.append(weight.t())
        weight.add_(1)

    site = f"{HERE}:{line('makes what is kept')}"
    assert recorded(step) == {(site, Group((5, 3), "float32", "cpu")): 3 * 5 * 3 * 4}


def test_a_record_sees_what_only_the_graph_holds():
    losses = []
    layer = nn.Linear(4, 6)

    def step(number):
        hidden = layer(torch.ones(3, 4))
        losses.append(torch.log_softmax(hidden, -1).sum())  # holds the softmax

    culprits = recorded(step)
    site = f"{HERE}:{line('holds the softmax')}"
    assert culprits[site, Group((3, 6), "float32", "cpu")] == 3 * 3 * 6 * 4


def test_a_record_sees_one_tensor_grow_and_not_one_that_is_replaced():
    state = {"cache": torch.zeros(1, 8)}

    def step(number):
        state["cache"] = torch.cat([state["cache"], torch.zeros(1, 8)])  # grows a cache
        state["buffer"] = torch.zeros(100)

    culprits = recorded(step)
    site = f"{HERE}:{line('grows a cache')}"
    assert culprits == {(site, Group((5, 8), "float32", "cpu")): 3 * 8 * 4}


def test_allocations_outside_torch_are_named():
    kept = []
    record = AllocationRecord()
    record.start()
    for _ in range(4):
        kept.append(np.zeros(100_000))  # makes arrays outside torch
        kept.append(json.loads("[" + "1.5, " * 5000 + "1]"))  # a library's
        passing = np.zeros(100_000)
        record.boundary()
        del passing
    record.stop()
    culprits = record.culprits()
    arrays = f"{HERE}:{line('makes arrays outside torch')}"
    assert culprits[arrays] == pytest.approx(3 * 800_000, rel=0.01)
    assert culprits[f"{HERE}:{line('a library' + chr(39) + 's')}"] > 3 * 5000 * 8
    assert max(culprits, key=culprits.__getitem__) == arrays
    assert not tracemalloc.is_tracing()


def test_tracing_that_was_on_stays_on():
    tracemalloc.start()
    recording = Recording()
    recording.boundary()
    recording.stop()
    assert tracemalloc.is_tracing()
    tracemalloc.stop()


def test_census_and_record_are_joined():
    fixed, vary = Group((8, 16), "float32", "cpu"), Group((99,), "float32", "cpu")
    seen = Recorded(
        3, {("a.py:1", fixed): 300, ("b.py:2", fixed): 300, ("c.py:3", vary): 900}, {"d.py:4": 90}
    )
    culprits = name_culprits({fixed: Held(40, 4000), vary: Held(1, 300)}, 20, seen)
    assert [str(each).replace("0.0 MB", "") for each in culprits] == [
        "tensors such as (99,) float32 on cpu,  in 3 steps, created at c.py:3",
        "40 tensors (8, 16) float32 on cpu,  in 20 steps, created at a.py:1 and b.py:2",
        "allocations outside torch,  in 3 steps, created at d.py:4",
        "1 tensors (99,) float32 on cpu,  in 20 steps",
    ]


@pytest.mark.parametrize("leak", [leak for leak in LEAKS if leak != "arrays"])
def test_a_real_leak_is_found_and_named(leak):
    steps = 110 if leak == "tensors" else 60  # 54 kB a step: less than the least growth within 60
    verdict = train(leak, seed=0, steps=steps)
    assert verdict.kinds == ("held tensors",)
    assert verdict.culprits[0].site == f"scripts/benchmarks/leak_trials.py:{line_of(leak)}"


def on_a_host(megabytes_a_step, num=100):
    """Resident memory of 1,000 MB that rises, while the tensors stay as they are."""
    return [
        MemorySample(step, int((1000 + megabytes_a_step * step) * MB), allocated_bytes=10 * MB)
        for step in range(num)
    ]


def test_a_heap_may_settle_for_a_few_percent_but_not_for_more():
    assert not detect_leak(on_a_host(0.2)).leak  # 18 MB: less than 3 %
    assert detect_leak(on_a_host(0.5)).kinds == ("not torch",)
    assert detect_leak(samples(device=0.2)).kinds == ("not torch",)  # a card is counted exactly


GROWING = """\
import gc, json, sys
import numpy, torch
from grpo.memory.leaks.leak import LeakWatch

kept = []
gc.freeze()
with LeakWatch(torch.device("cpu"), count=sys.argv[1] == "counted") as watch:
    for step in range(80):
        kept.append({made})
        watch.sample(step)
    print(json.dumps(watch.verdict().to_dict()))
"""


def watched(tmp_path, made, counted):
    """The verdict of a process of its own, whose heap has no gaps that earlier tests left."""
    script = tmp_path / "growing.py"
    script.write_text(GROWING.replace("{made}", made))
    ended = subprocess.run([sys.executable, script, counted], capture_output=True, text=True, check=True)
    return json.loads(ended.stdout), f"{script}:9"


def test_growth_that_is_not_torchs_is_found_and_named(tmp_path):
    verdict, site = watched(tmp_path, "numpy.ones(2**18)", "counted")
    assert verdict["kinds"] == ["not torch"]
    assert verdict["culprits"][0]["site"] == site
    (growth,) = (each for each in verdict["growth"] if each["leak"])
    assert growth["bytes_per_step"] == pytest.approx(2 * MB, rel=0.1)


def test_a_watch_that_does_not_count_knows_no_kind(tmp_path):
    verdict, site = watched(tmp_path, "torch.ones(2**19)", "uncounted")
    assert verdict["kinds"] == ["memory of unknown kind"]
    assert verdict["culprits"][0]["site"] == site


def test_a_sound_loop_is_clean():
    verdict = train("none", seed=0, steps=150)
    assert not verdict.leak and verdict.culprits == ()
    assert verdict.growth[0].bytes_per_step == 0


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
