"""Which batch is worth it: by a made-up noise scale and pace, and measured on a tiny model."""

import io
import json

import pytest
from rich.console import Console

from grpo.config import SettingsError
from grpo.run.pace import Pace
from grpo.workbench.worth_it import Worth, in_words, measure, save, worth_table

QUIET = Console(quiet=True)


def worth(**changes) -> Worth:
    """A pass costs 2 s and a row 0.01 s; noise of 200 rows; 256 fit at once."""
    given = {
        "noise_rows": 200.0, "noise_low": 150.0, "noise_high": 300.0, "pace": Pace(2.0, 0.01),
        "whole_rows": 256, "batch_size": 64, "group_size": 8, "measured_rows": 1024,
    }  # fmt: skip
    return Worth(**{**given, **changes})


def test_progress_is_signal_over_seconds():
    """B / (B + S) / (passes * 2 + B / 100): the most at sqrt(2 S / 0.01) = 200 rows or so."""
    found = worth()
    assert found.signal(200) == 0.5 and found.seconds(256) == pytest.approx(4.56)
    assert found.seconds(512) == pytest.approx(2 * 2 + 5.12)
    assert found.progress(200) == pytest.approx(0.5 / 4)
    assert found.best == 256  # of 128: 0.119, 256: 0.123, 512: 0.079
    assert found.sizes == [8, 16, 32, 64, 128, 256, 512, 1024]


def test_little_noise_wants_a_small_batch_and_much_of_it_a_large_one():
    assert worth(noise_rows=5.0).best == 32
    assert worth(noise_rows=50_000.0).best == 256  # beyond, as many rows a second
    assert worth(noise_rows=50_000.0, whole_rows=2048).best == 2048


def test_it_is_said_in_words_and_in_a_table():
    console = Console(width=100, file=io.StringIO(), markup=False)
    console.print(worth_table(worth()))
    text = console.file.getvalue()
    assert "the largest at once" in text and "yours" in text and "best" in text
    noise, best, passes = in_words(worth())
    assert noise == "The noise scale is about 200 rows (95 %: 150 to 300)."
    assert best == "Batch 256 gets on fastest; 64 makes 75% of its progress a minute."
    assert "each pass costs 2 s besides its rows, 21.9% of a step of 512" in passes
    assert in_words(worth(batch_size=256))[1] == "Batch 256 is the one that gets on fastest."
    assert "to no end" in in_words(worth(noise_high=None))[0]


def test_what_cannot_be_told_from_noise_is_said():
    (sentence,) = in_words(worth(noise_rows=None, noise_low=900.0))
    assert "at least 900 rows" in sentence and "--batches" in sentence
    assert worth(noise_rows=None).progress(64) == 0


@pytest.mark.parametrize(
    ("changes", "batches", "rows", "said"),
    [
        ({}, 3, 8, "batches is 3"), ({}, 8, 6, "rows is 6"), ({}, 8, 4, "rows is 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(config, changes, batches, rows, said):
    with pytest.raises(SettingsError, match=said):
        measure(config, QUIET, batches=batches, rows=rows)


def test_a_tiny_model_is_measured_and_left_alone(config, tmp_path, made_up_plans):
    found = measure(config, QUIET, batches=4, rows=8)
    assert found.measured_rows == 32 and found.group_size == 4 and found.batch_size == 8
    assert found.pace.seconds(8, 8) > 0 and found.whole_rows >= 8
    assert not config.runs_dir.exists()  # its run folder was a temporary one
    numbers, drawing = save(found, tmp_path / "out")
    saved = json.loads(numbers.read_text())
    assert saved["best"] == found.best and drawing.stat().st_size > 10_000
