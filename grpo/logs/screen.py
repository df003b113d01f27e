"""The display: consoles, log lines, a line a step, a completion now and then, the time that remains."""

import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from grpo.logs import waiting
from grpo.logs.progress import Progress

LOG_FILE = "log.txt"
"""In a run's folder: all log lines of the first process, those of each step among them."""
_INDENT = len("12:00:00 WARNING ")
_LETTERS = 300
"""Characters of a prompt and of a completion that are shown."""
_ERROR_LETTERS = 700
"""The longest error message that is shown whole; one with reasons and remedies has some 500 letters."""


def plain_console(**options: Any) -> Console:
    """A console that shows paths, names and values as they are, without markup; options as of `Console`."""
    return Console(markup=False, **options)


def print_error(console: Console, error: object) -> None:
    """Print what is wrong, with the remedy."""
    console.print(
        Text.assemble(("error", "red"), f" {shortened(str(error), _ERROR_LETTERS)}"), highlight=False
    )


def shortened(text: str, most: int = _ERROR_LETTERS) -> str:
    """The beginning and the end of a text of more than `most` letters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def configure_logging(level: str, console: Console, *, process: int = 0) -> None:
    """Send log lines through `console`, above a progress bar if one is shown. For entry points.

    Of several processes the first one tells what happens, the others only what goes wrong. Bars of what
    takes its time are shown there as well. What is for programs that read along is left out on a terminal.
    """
    logger.remove()
    waiting.show_on(None if process else console)
    line = "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> "
    if process:
        line += f"process {process}: "
        level = level if level in ("DEBUG", "ERROR") else "WARNING"
    if not console.is_terminal:
        logger.add(sys.stderr, level=level, format=line + "{message}")
        return

    def wrapped(record: Any) -> str:
        """At words; what has to be copied as a whole stays so."""
        width = max(40, console.width - _INDENT)
        paragraphs = (
            textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
            for text in record["message"].split("\n")
        )
        lines = [text for paragraph in paragraphs for text in paragraph or [""]]
        record["extra"]["shown"] = f"\n{' ' * _INDENT}".join(lines)
        return line + "{extra[shown]}\n{exception}"

    logger.add(
        lambda message: console.out(message, end="", highlight=False),
        level=level,
        format=wrapped,
        colorize=True,
        filter=lambda record: not record["extra"].get("piped"),
    )


@contextmanager
def keep_log(folder: Path) -> Iterator[None]:
    """Inside, log lines go to a run's folder, too, as long as they can be written there."""
    file = folder / LOG_FILE
    try:
        file.open("a").close()
    except OSError as error:
        logger.warning("{} cannot be written ({})", file, error.strerror)

    def write(message: str) -> None:
        with suppress(OSError), file.open("a", encoding="utf-8") as log:  # a full disk: the console has it
            log.write(message)

    sink = logger.add(write, level="INFO", format="{time:YYYY-MM-DD HH:mm:ss} {level: <7} {message}")
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody has removed all
            logger.remove(sink)


def in_one_line(metrics: Mapping[str, float], num_rows: int) -> str:
    """A step's reward and its spread within groups, tokens, KL where there is one, rate, speed, memory."""
    kl = f"kl {metrics['kl']:.4f}, " if "kl" in metrics else ""
    return (
        f"reward {metrics['reward']:.3f} ± {metrics['reward_std_within_groups']:.2f}, "
        f"{metrics['completions/mean_length']:.0f} tokens, {kl}"
        f"lr {metrics['learning_rate']:.0e}, {num_rows / metrics['step_time']:.0f} samples/s, "
        f"{metrics['memory/peak_gb']:.2f} GB"
    )


def held_out_line(metrics: Mapping[str, float]) -> str:
    """An evaluation's means, the reward first."""
    names = sorted(metrics, key=lambda name: name != "eval_reward")
    return ", ".join(
        f"{name.removeprefix('eval_').removesuffix('/mean')} {metrics[name]:.3f}" for name in names
    )


class StepProgress:
    """On a terminal a line a step that stays, and below a bar with the time that remains; else log lines."""

    def __init__(self, console: Console, progress: Progress, *, finished: int) -> None:
        self._console, self._progress = console, progress
        self._bar = ProgressBar(
            TextColumn(f"step {{task.fields[step]}}{progress.of_steps}"),
            BarColumn(40),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0, step=finished)
        self._bar.update(self._task, completed=progress.share(finished))
        self._bar.start()

    def update(self, step: int, summary: str) -> None:
        if forecast := self._progress.forecast(step):
            logger.info("{}", forecast)
        logger.bind(piped=True).info("step {} - {}", step, summary)
        if self._console.is_terminal:
            self._console.print(f"step {step}: {summary.replace(' samples/s', '/s')}", highlight=False)
        self._bar.update(self._task, completed=self._progress.share(step), step=step)

    def show(self, record: Mapping[str, Any]) -> None:
        """A completion, one of `completion_records`."""
        scores = {**record["rewards"], **record["components"]}
        shown = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
        asked = record["messages"][-1].get("content", "") if "messages" in record else record["prompt"]
        logger.info("{}\n→ {}\n({})", _printable(asked), _printable(record["completion"]), shown)

    def close(self) -> None:
        self._bar.stop()


def _printable(text: str) -> str:
    """The beginning and the end of a text, without what a terminal would obey."""
    text = "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in text)
    return shortened(text, _LETTERS)
