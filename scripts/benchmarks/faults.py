"""Faults on a run's way to the disk: `python scripts/benchmark_faults.py --trials 300`.

Each trial runs the command, with a write, flush or rename that fails or a kill in its place at one of the
calls that it makes in its folder, or a kill at any moment; then it goes on, and has to end bit for bit as
a run that nothing happened to. Left out: faults of the disk itself, whose flushed bytes change.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from loguru import logger
from rich import box
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.disk_calls import Calls, become_the_command, disk_is_full, killed
from benchmarks.random_gpt2 import make_random_gpt2
from grpo.data.load import POSITIONS
from grpo.run.checkpoint import CheckpointFolder, find_damage
from grpo.run.tracking import COMPLETIONS_FILE, METRICS_FILE, read_lines

STEPS = 4
COLUMNS = ("trials", "survived", "lost", "false_success", "traceback")
Kind = Literal["fails once", "stays full", "SIGKILL at a call", "SIGKILL at a moment"]
KINDS: tuple[Kind, ...] = ("fails once", "stays full", "SIGKILL at a call", "SIGKILL at a moment")


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    false_success: bool = False
    """Exit status 0, and the run folder is not complete."""
    lost: bool = False
    """It could not go on to the same end."""
    traceback: bool = False
    said: str = field(default="", compare=False)
    """By the command that ended with a traceback."""

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.false_success or other.false_success,
            self.lost or other.lost,
            self.traceback or other.traceback,
            self.said or other.said,
        )

    @property
    def survived(self) -> bool:
        return self == Outcome()


class Trials:
    """Runs of one model of seconds, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._flags = make_task(folder)
        self.calls = {"run": 0, "resume": 0}
        """A run's that nothing happens to, and of one that goes on after two steps."""
        self.seconds = 0.0

    def prepare(self) -> None:
        """The run that all others are compared with, and how many calls it makes."""
        counted = self.folder / "counted"
        status, said = self._child("first", ["--steps", "1"])  # which traces its memory, once
        if status:
            raise RuntimeError(f"the run that nothing happens to failed: {said}")
        begun = time.monotonic()
        self._child("straight", ["--steps", str(STEPS)], Calls(), counted)
        self.seconds = time.monotonic() - begun
        self.calls["run"] = int(counted.read_text())
        self._child("half", ["--steps", "2"])
        self._child("half", [*self._resume("half")], Calls(), counted)
        self.calls["resume"] = int(counted.read_text())
        self._expected = self._end("straight")

    def _resume(self, name: str) -> list[str]:
        return ["--resume", str(self.folder / "runs" / name), "--steps", str(STEPS)]

    def try_one(self, number: int, kind: Kind, rng: random.Random) -> Outcome:
        """A fault in a run, or in one that is resumed; then what is left goes on."""
        name, when = f"trial-{number}", rng.choice(("run", "resume"))
        words = ["--steps", str(STEPS)]
        if when == "resume":
            self._child(name, ["--steps", "2"])
            words = self._resume(name)
        at, after_s = rng.randint(1, self.calls[when]), None
        if kind == "SIGKILL at a moment":
            calls, after_s = Calls(), rng.uniform(0, self.seconds)
        else:
            calls = Calls(at, killed if kind == "SIGKILL at a call" else disk_is_full, kind == "stays full")
        status, said = self._child(name, words, calls, kill_after_s=after_s)
        return self._outcome(said, false_success=status == 0 and not self._complete(name)) + self._go_on(
            name, kind
        )

    def _outcome(self, said: str, *, false_success: bool = False, lost: bool = False) -> Outcome:
        traceback = "Traceback" in said
        return Outcome(false_success, lost, traceback, said if traceback else "")

    def _go_on(self, name: str, kind: Kind) -> Outcome:
        """To the end, from its checkpoint or, where it had come to none, from the beginning."""
        if self._complete(name):
            return Outcome(lost=not self._equals(name, kind))
        folder = self.folder / "runs" / name
        checkpoints = CheckpointFolder(folder / "checkpoints", keep=9)
        if not checkpoints.all():
            name = f"{name}-anew"
            status, said = self._child(name, ["--steps", str(STEPS)])
        else:
            status, said = self._child(name, self._resume(name))
        return self._outcome(said, lost=status != 0 or not self._equals(name, kind))

    def _complete(self, name: str) -> bool:
        return find_damage(self.folder / "runs" / name / "checkpoints" / f"step-{STEPS:06d}") is None

    def _equals(self, name: str, kind: Kind) -> bool:
        """Weights, moments, and what was logged and is not of this machine's clock and memory.

        Lines that a full disk did not take are missing, which was said; a kill loses none.
        """
        if not self._complete(name):
            return False
        (tensors, lines), (expected, all_lines) = self._end(name), self._expected
        logged = lines == all_lines if "SIGKILL" in kind else all(line in all_lines for line in lines)
        same = (torch.equal(tensor, expected[key]) for key, tensor in tensors.items())
        return logged and tensors.keys() == expected.keys() and all(same)

    def _end(self, name: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
        run = self.folder / "runs" / name
        checkpoint = run / "checkpoints" / f"step-{STEPS:06d}"
        files = [checkpoint / name for name in ("model.safetensors", "trainer.safetensors")]
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        passing = ("timing/", "memory/", "step_time", "progress")  # of as many steps as were asked for
        lines = [
            {key: value for key, value in line.items() if not key.startswith(passing)}
            for file in (METRICS_FILE, COMPLETIONS_FILE)
            for line in read_lines(run / file)
        ]
        return tensors, lines

    def _child(
        self,
        name: str,
        words: Sequence[str],
        calls: Calls | None = None,
        counted: Path | None = None,
        *,
        kill_after_s: float | None = None,
    ) -> tuple[int, str]:
        """The command in a process of its own: how it ended, and what it said."""
        said = self.folder / f"{name}.txt"
        named = [] if "--resume" in words else ["--name", name]
        process = os.fork()
        if not process:
            become_the_command([*self._flags, *named, *words], said, self.folder, calls, counted)
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        text = said.read_text(errors="replace")
        said.unlink()
        return os.waitstatus_to_exitcode(status), text


def make_task(folder: Path) -> list[str]:
    """A model and prompts of a second, and the flags of a run on them."""
    lines = POSITIONS.joinpath("train.txt").read_text().splitlines()
    (folder / "prompts.txt").write_text("\n".join(lines[:40] + lines[-40:]))
    model = make_random_gpt2(folder / "model")
    given = {
        "model": model, "prompts": folder / "prompts.txt", "engine": "off", "precision": "fp32",
        "batch-size": 8, "group-size": 4, "max-new-tokens": 8, "eval-interval": 2, "eval-prompts": 4,
        "heldout-share": 0.2, "checkpoint-interval": 1, "device": "cpu",
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + ["--trackers"]


def try_faults(trials: int, seed: int) -> dict[Kind, Counter[str]]:
    """How often what happened, by kind of fault."""
    rng = random.Random(seed)
    torch.set_num_threads(1)  # a process with more could not be forked
    found: dict[Kind, Counter[str]] = {kind: Counter() for kind in KINDS}
    with TemporaryDirectory() as name:
        all_trials = Trials(Path(name))
        all_trials.prepare()
        for number in range(trials):
            kind = KINDS[number % len(KINDS)]
            outcome = all_trials.try_one(number, kind, rng)
            found[kind]["trials"] += 1
            for what in COLUMNS[1:]:
                found[kind][what] += getattr(outcome, what)
            if not outcome.survived:
                logger.warning("trial {}, {}: {}", number, kind, outcome)
    return found


def fault_table(found: dict[Kind, Counter[str]]) -> Table:
    table = Table("fault", *(column.replace("_", " ") for column in COLUMNS), box=box.MARKDOWN)
    for kind, counts in found.items():
        table.add_row(kind, *(str(counts[column]) for column in COLUMNS))
    return table
