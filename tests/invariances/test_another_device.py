"""An accelerator that is made up changes nothing: it has memory of its own, and mixes no devices."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from another_device import build
from another_device.rehearse import rehearse
from several_processes import in_processes

COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
]


@pytest.fixture(scope="module")
def found(model_folders, data_file, tmp_path_factory) -> dict[str, Any]:
    """All runs, in one process: a device that is there once is there for all that come after."""
    folder: Path = tmp_path_factory.mktemp("another-device")
    library = folder / "device.so"
    build(library, COMPILER)
    (ended,) = in_processes(1, rehearse, library, model_folders["gpt2"], data_file, folder / "runs")
    assert ended.error is None
    return ended.value


@pytest.mark.parametrize("run", ["plain", "rich, resumed", "short"])
def test_the_run_is_the_cpus(found, run: str):
    """Operations may be put together otherwise, so to rounding; not a token differs."""
    assert found[run]["weights apart"] < 1e-10
    assert found[run]["same texts"] and found[run]["same held out"]
    assert (found[run]["retries"] > 0) == (run == "short")


def test_peaks_are_what_was_predicted_and_out_of_memory_costs_a_retry(found):
    """By the allocator's own statistics. What is foretold is for texts without gaps: up to a quarter more."""
    for phase, line in found["plain"]["phases"].items():
        assert line["process_bytes"] > line["added_bytes"] > 0
        assert 0.97 < line["predicted_bytes"] / line["added_bytes"] < 1.25, phase
    assert found["short"]["phases"]["learn"]["rows"] < 16
    assert any(
        "learn: out of memory with 16 rows (OutOfMemoryError: pretend" in line for line in found["said"]
    )


def test_a_stream_is_one_copy_and_nothing_is_left_on_the_device(found):
    """One copy of everything it is learned from; and one back, of a step's sums."""
    copies = found["copies"]
    assert copies["steps"] == 3 and copies["streams"] >= 9
    assert copies["to device"] == copies["streams"] and copies["to host"] == copies["steps"]
    assert copies["waits"] == 0
    assert found["left behind"] == 0


def test_a_model_that_does_not_fit_is_no_traceback(found):
    assert found["too small"].startswith("the model does not fit: what stays all along needs")
