"""Whole runs in this process, and what they leave behind, to be compared bit for bit or to rounding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from grpo.config import Config
from grpo.logs.tracking import COMPLETIONS_FILE, METRICS_FILE, read_lines
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

BY_FIELD = {
    "model": "rook-tiny",
    "prompts": "bundled",
    "credit": "field",
    "advantage_scale": "batch",
    "reward": ("policy-legal", "environment-sparse"),
    "max_new_tokens": 64,
}
"""Settings: the demo's credit, with a model whose rows are split by field, as the tests' own never are."""
PASSING = ("timing/", "memory/", "step_time")
"""Metrics that are not the same twice."""


class Killed(BaseException):
    """An error that no `except Exception` sees, as with a real kill."""


def train(
    config: Config,
    prepare: Callable[[Trainer], object] = lambda trainer: None,
    *,
    stop_after: int | None = None,
    die_in: int | None = None,
    error: type[BaseException] = Killed,
) -> Path:
    """The folder of a run in this process.

    prepare(trainer): before its first step. stop_after: a step during which it is asked to stop (0: before
    the first). die_in: a step in the middle of which `error` is raised.
    """
    stop = StopRequest()
    stop.requested = stop_after == 0
    with open_run(config) as run:
        trainer = Trainer(run, Console(quiet=True))
        prepare(trainer)
        log, score = trainer.log, trainer.phases.score

        def log_then_ask_to_stop(step: int, *rest: Any) -> None:
            stop.requested |= step == stop_after
            log(step, *rest)

        def score_or_die(*rest: Any) -> Any:
            if trainer.finished + 1 == die_in:
                raise error
            return score(*rest)

        trainer.log, trainer.phases.score = log_then_ask_to_stop, score_or_die  # type: ignore[method-assign]
        try:
            trainer.train(stop)
        except error:
            assert die_in is not None
        return run.folder


def metrics_of(folder: Path, passing: tuple[str, ...] = PASSING) -> list[dict[str, Any]]:
    """A run's metrics, but for times and memory."""
    return [
        {name: value for name, value in record.items() if not name.startswith(passing)}
        for record in read_lines(folder / METRICS_FILE)
    ]


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind with its last checkpoint, apart from times, bytes and its settings."""
    last = max((folder / "checkpoints").glob("step-*"))
    state = json.loads((last / "trainer.json").read_text())
    assert state.pop("settings")["name"] == folder.name and state.pop("trained_s") > 0
    state["memory"] = {phase: (each["rows"], each["oom_ceiling"]) for phase, each in state["memory"].items()}
    return {
        "tensors": {
            f"{file.relative_to(last)}: {name}": tensor
            for file in sorted(last.rglob("*.safetensors"))
            for name, tensor in load_file(file).items()
        },
        "state": state,
        "metrics": metrics_of(folder),
        "completions": read_lines(folder / COMPLETIONS_FILE),
    }


def assert_same_outcome(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    assert one["tensors"].keys() == other["tensors"].keys()
    for name, tensor in one["tensors"].items():
        assert torch.equal(tensor, other["tensors"][name]), name
    for part in ("state", "metrics", "completions"):
        assert one[part] == other[part]


def assert_close_outcome(one: dict[str, Any], other: dict[str, Any], *, exactness: float) -> None:
    """The same tokens; the weights as close in global norm, metrics and Adam's moments to rounding."""
    texts = [[row["completion"] for row in each["completions"]] for each in (one, other)]
    assert texts[0] == texts[1] and texts[0]
    weights, others = (
        torch.cat([t.flatten() for name, t in each["tensors"].items() if name.startswith("model")])
        for each in (one, other)
    )
    assert (weights - others).norm() <= exactness * others.norm()
    for name, tensor in other["tensors"].items():
        if name.startswith("trainer"):
            mine = one["tensors"][name]
            assert torch.allclose(mine, tensor, rtol=1e3 * exactness, atol=exactness), name
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e3 * exactness, abs=1e3 * exactness, nan_ok=True)
