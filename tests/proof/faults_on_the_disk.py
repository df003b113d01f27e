"""Faults on a run's way to the disk: it goes on to the same end, bit for bit, or says what is lost.

A write, flush or rename fails, once or from then on, or a kill comes in its place or at any moment, in a run
or in one that goes on. Left out: faults of the disk itself, whose flushed bytes change.
"""

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from disk_calls import Calls, disk_is_full, killed, run_command
from safetensors.torch import load_file
from whole_runs import metrics_of

from grpo.logs.tracking import COMPLETIONS_FILE, read_lines
from grpo.run.checkpoint import CheckpointFolder, find_damage

STEPS, TRIALS, SEED = 4, 10, 0
Kind = Literal["fails once", "stays full", "SIGKILL at a call", "SIGKILL at a moment"]
KINDS: tuple[Kind, ...] = ("fails once", "stays full", "SIGKILL at a call", "SIGKILL at a moment")


class Runs:
    """Runs of seconds, and the one that nothing happens to, with which all others are compared."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self.folder, self._flags = folder, flags
        counted = folder / "counted"
        begun = time.monotonic()
        self.start("straight", "--steps", STEPS, calls=Calls(), counted=counted)
        self.seconds = time.monotonic() - begun
        self.calls = {"run": int(counted.read_text())}
        self.start("half", "--steps", 2)
        self.start("half", *self.resume("half"), calls=Calls(), counted=counted)
        self.calls["resume"] = int(counted.read_text())
        self.expected = self.end("straight")

    def resume(self, name: str) -> list[object]:
        return ["--resume", self.folder / "runs" / name, "--steps", STEPS]

    def start(
        self,
        name: str,
        *words: object,
        calls: Calls | None = None,
        counted: Path | None = None,
        kill_after_s: float = math.inf,
    ) -> int:
        """The command in a process of its own: how it ended. AssertionError where it says a traceback."""
        said = self.folder / f"{name}.txt"
        named = [] if "--resume" in words else ["--name", name]
        typed = [*self._flags, *named, *map(str, words)]
        status = run_command(typed, said, self.folder, calls, counted, kill_after_s=kill_after_s)
        text = said.read_text(errors="replace")
        said.unlink()
        assert "Traceback" not in text, text
        return status

    def is_complete(self, name: str) -> bool:
        return find_damage(self.folder / "runs" / name / "checkpoints" / f"step-{STEPS:06d}") is None

    def end(self, name: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """Weights, moments, and what was logged and is not of this machine's clock and memory."""
        run = self.folder / "runs" / name
        checkpoint = run / "checkpoints" / f"step-{STEPS:06d}"
        files = [checkpoint / name for name in ("model.safetensors", "trainer.safetensors")]
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        passing = ("timing/", "memory/", "step_time", "progress")  # of as many steps as were asked for
        return tensors, [*metrics_of(run, passing), *read_lines(run / COMPLETIONS_FILE)]

    def try_one(self, name: str, kind: Kind, rng: random.Random) -> None:
        """A fault in a run, or in one that is resumed; then what is left goes on to the end."""
        when, words = rng.choice(("run", "resume")), ["--steps", STEPS]
        if when == "resume":
            self.start(name, "--steps", 2)
            words = self.resume(name)
        at, after_s = rng.randint(1, self.calls[when]), math.inf
        if kind == "SIGKILL at a moment":
            calls, after_s = Calls(), rng.uniform(0, self.seconds)
        else:
            calls = Calls(at, killed if kind == "SIGKILL at a call" else disk_is_full, kind == "stays full")
        status = self.start(name, *words, calls=calls, kill_after_s=after_s)
        assert status or self.is_complete(name), "status 0, and the folder is not complete"
        if not self.is_complete(name):
            if CheckpointFolder(self.folder / "runs" / name / "checkpoints", keep=9).all():
                assert self.start(name, *self.resume(name)) == 0
            else:
                name = f"{name}-anew"
                assert self.start(name, "--steps", STEPS) == 0
        (tensors, lines), (expected, all_lines) = self.end(name), self.expected
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in tensors.items())
        # Lines that a full disk did not take are missing, which was said; a kill loses none.
        assert lines == all_lines if "SIGKILL" in kind else all(line in all_lines for line in lines)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, command_of_seconds) -> Runs:
    torch.set_num_threads(1)  # a process with more could not be forked
    return Runs(tmp_path_factory.mktemp("faults"), command_of_seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_earned_is_lost_and_nothing_is_hidden(runs, kind):
    rng = random.Random(f"{SEED} {kind}")
    for trial in range(TRIALS):
        runs.try_one(f"{kind} {trial}", kind, rng)
