"""What a person sees of a run: lines of 80 columns that stay, and a log beside the run."""

import io
import os
import re
import sys

import pytest
from loguru import logger
from rich.console import Console

from grpo import waiting
from grpo.run.progress import Progress
from grpo.run.screen import LOG_FILE, StepProgress, configure_logging, held_out_line, in_one_line, keep_log

METRICS = {
    "reward": 0.8365, "reward_std": 0.151, "completions/mean_length": 144.2, "kl": 0.0123,
    "learning_rate": 1e-5, "step_time": 0.51, "memory/peak_gb": 20.016,
}  # fmt: skip
SAID = {"rewards": {"right": 1.0}, "components": {}, "prompt": "2 + 2?", "completion": "4\x1b[2J\nor so"}


@pytest.fixture
def terminal():
    """A terminal of 80 columns that is read along; afterwards logs go where they went."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, markup=False)
    configure_logging("INFO", console)
    yield console, file
    logger.remove()
    logger.add(sys.stderr)
    waiting.show_on(None)


def test_a_step_is_one_line_of_80_columns_that_stays(terminal):
    console, file = terminal
    bar = StepProgress(console, Progress(1000, None), finished=0)
    bar.update(1000, in_one_line(METRICS, 64))
    bar.close()
    (line,) = (line for line in file.getvalue().splitlines() if "reward" in line)
    line = line[line.index("step 1000:") :]
    assert line.rstrip() == "step 1000: reward 0.837 ± 0.15, 144 tokens, kl 0.0123, lr 1e-05, 125/s, 20.02 GB"
    assert len(line) <= 82  # of a thousand steps, on a large card


def test_what_is_for_programs_is_not_on_a_terminal(terminal):
    _, file = terminal
    logger.bind(piped=True).info("CPU memory - allocated: 0.60GB, peak: 0.60GB")
    logger.info("held-out at step 0: {}", held_out_line({f"eval_c{n}/some_column": 0.5 for n in range(9)}))
    said = re.sub(r"\x1b\[\d*m", "", file.getvalue())
    assert "CPU memory" not in said
    assert max(map(len, said.splitlines())) <= 80 and said.count("0.500") == 9  # wrapped at words


def test_the_reward_comes_first():
    metrics = {"eval_policy/legal": 0.5, "eval_reward": 0.75, "eval_rewards/policy/mean": 0.8}
    assert held_out_line(metrics) == "reward 0.750, policy/legal 0.500, rewards/policy 0.800"


def test_a_completion_is_shown_with_its_scores_and_moves_no_cursor(terminal):
    console, file = terminal
    bar = StepProgress(console, Progress(3, None), finished=0)
    bar.show(SAID)
    bar.show({**SAID, "messages": [{"role": "user", "content": "Two and two?"}], "completion": "x" * 500})
    bar.close()
    said = file.getvalue()
    assert "2 + 2?" in said and "→ 4�[2J" in said and "(right 1.00)" in said
    assert "Two and two?" in said and "…" in said and "x" * 400 not in said


def test_the_log_beside_a_run_stands_a_full_disk_and_a_folder_in_its_place(tmp_path, logged):
    with keep_log(tmp_path):
        logger.info("one")
    logger.info("two")
    assert [line.split()[-1] for line in (tmp_path / LOG_FILE).read_text().splitlines()] == ["one"]
    (tmp_path / LOG_FILE).unlink()
    if os.path.exists("/dev/full"):
        (tmp_path / LOG_FILE).symlink_to("/dev/full")
        with keep_log(tmp_path):
            logger.info("three")
        (tmp_path / LOG_FILE).unlink()
    (tmp_path / LOG_FILE).mkdir()
    with keep_log(tmp_path):
        logger.info("four")
    assert any("log.txt cannot be written" in line for line in logged)
