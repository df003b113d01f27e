"""Speed and memory of a training step beside TRL's.

Contenders are processes that take turns, step by step, in an order that changes; a ratio is of two
steps of one round.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger
from rich import box
from rich.table import Table
from scipy.stats import t as student

from benchmarks import worker_environment
from benchmarks.speed_work import OWN_REWARD, ModelName, prepare
from benchmarks.speed_worker import Contender, StepTime, Work

CONTENDERS: tuple[Contender, ...] = ("ours", "trl", "trl defaults")
ANYWHERE = 1.0, 0.8
"""Least ratio, and most memory, on any machine: fp32 on two AVX2 cores has 1.23 and 0.68 of TRL's best."""
WARM_UP_STEPS = 3
"""Of ours, which counts memory operation by operation in the first two; of TRL's there is one."""


@dataclass(frozen=True)
class Case:
    """One row of the table. `bars`: least ratios against TRL's best and its defaults, and of memory."""

    name: str
    model: ModelName
    prompt_tokens: int | None
    train_rows: int
    rounds: int
    bars: tuple[float, float]
    memory_bars: tuple[float, float] = (0.6, 0.5)
    batch_size: int = 64
    group_size: int = 8
    max_new_tokens: int = 144


CASES = (
    Case("rook-tiny's shape, 144 tokens each", "rook-tiny without end", 60, 64, 5, (2.0, 5.0)),
    Case("rook-tiny, half policy, natural ends", "rook-tiny", None, 64, 5, (3.0, 6.0)),
    Case("GPT-2 124 M, 144 tokens each", "GPT-2 124 M without end", 60, 16, 2, (3.0, 4.0)),
    Case(
        "Qwen's kind, 8 layers of 512, 128 tokens each",
        "Qwen's kind without end",
        120,
        64,
        3,
        (6.0, 6.0),
        memory_bars=(0.45, 0.45),
        max_new_tokens=128,
    ),
)


@dataclass
class Outcome:
    case: Case
    steps: dict[Contender, list[StepTime]] = field(default_factory=dict)

    def ratio(self, other: Contender) -> tuple[float, float, float]:
        """Seconds a token of `other` over ours: geometric mean of the rounds, and its 95 % interval.

        Where texts end by themselves they are not of one length, though of one kind.
        """
        pairs = zip(self.steps[other], self.steps["ours"], strict=True)
        logs = np.log([
            theirs.seconds / theirs.new_tokens / (ours.seconds / ours.new_tokens) for theirs, ours in pairs
        ])  # fmt: skip
        reach = math.inf
        if len(logs) > 1:
            reach = float(student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
        mean = float(logs.mean())
        return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)

    def memory_ratio(self, other: Contender) -> float:
        return self.steps["ours"][-1].peak_bytes / self.steps[other][-1].peak_bytes


class Worker:
    """A contender's process."""

    def __init__(self, work: Work) -> None:
        command = [sys.executable, "-m", "benchmarks.speed_worker", json.dumps(asdict(work))]
        self._log = open(Path(work.folder, f"{work.contender.replace(' ', '-')}.log"), "w")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=worker_environment(),
        )  # fmt: skip
        self._read()

    def step(self) -> StepTime:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return StepTime(**self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.flush()
            tail = Path(self._log.name).read_text()[-2000:]
            raise RuntimeError(f"a contender died:\n{tail}")
        record: dict[str, Any] = json.loads(line)
        return record


@contextmanager
def working(works: Mapping[Contender, Work]) -> Iterator[dict[Contender, Worker]]:
    """A process for each, all ended at the end."""
    workers: dict[Contender, Worker] = {}
    try:
        for key, work in works.items():
            workers[key] = Worker(work)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def race(
    case: Case, folder: Path, *, contenders: Sequence[Contender] = CONTENDERS, device: str = "cpu"
) -> Outcome:
    """Every contender's steps, in rounds."""
    model, ours, theirs = prepare(case.model, case.prompt_tokens, folder)
    work = Work(
        "ours", str(model), str(ours), str(folder), case.batch_size, case.group_size, case.max_new_tokens,
        train_rows=case.train_rows, steps=WARM_UP_STEPS + case.rounds + 1, device=device,
        has_own_reward=Path(folder, OWN_REWARD).exists(),
    )  # fmt: skip
    works = {
        name: replace(work, contender=name, prompts=str(theirs if name.startswith("trl") else ours))
        for name in contenders
    }
    outcome = Outcome(case, {name: [] for name in contenders})
    with working(works) as workers:
        for name, worker in workers.items():
            for _ in range(WARM_UP_STEPS if name == "ours" else 1):
                worker.step()
        for turn in range(case.rounds):
            for name in contenders if turn % 2 else tuple(reversed(contenders)):
                step = workers[name].step()
                outcome.steps[name].append(step)
                logger.info("{}, round {}: {} {:.2f} s", case.name, turn + 1, name, step.seconds)
    return outcome


def ratio_text(mean: float, least: float, most: float) -> str:
    return f"{mean:.2f}× ({least:.2f} to {most:.2f})" if math.isfinite(most) else f"{mean:.2f}×"


def race_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        "work", "samples a second", "against TRL's best", "against its defaults", "peak memory, GB",
        "of TRL's best", "of its defaults", box=box.MARKDOWN,
    )  # fmt: skip
    for outcome in outcomes:
        ratios: list[str] = []
        shares: list[str] = []
        for other in CONTENDERS[1:]:
            raced = other in outcome.steps
            ratios.append(ratio_text(*outcome.ratio(other)) if raced else "")
            shares.append(f"{outcome.memory_ratio(other):.2f}" if raced else "")
        ours = outcome.steps["ours"]
        rate = outcome.case.batch_size / float(np.median([step.seconds for step in ours]))
        memory = f"{ours[-1].peak_bytes / 2**30:.2f}"
        table.add_row(outcome.case.name, f"{rate:.1f}", *ratios, memory, *shares)
    return table


def race_verdicts(outcomes: Sequence[Outcome], *, goals: bool = True) -> dict[str, bool]:
    """Whether each bar is met, by the sentence that says so. goals: ours; else ANYWHERE."""
    verdicts = {}
    for outcome in outcomes:
        case = outcome.case
        for other, own, memory_own in zip(CONTENDERS[1:], case.bars, case.memory_bars, strict=True):
            bar, memory_bar = (own, memory_own) if goals else ANYWHERE
            if other in outcome.steps:
                ratio, share = outcome.ratio(other)[0], outcome.memory_ratio(other)
                verdicts[f"{case.name}: {ratio:.2f} times {other} (bar {bar:g})"] = ratio >= bar
                verdicts[f"{case.name}: {share:.2f} of {other}'s memory (bar {memory_bar:g})"] = (
                    share <= memory_bar
                )
    return verdicts


def as_json(outcomes: Sequence[Outcome]) -> Mapping[str, Any]:
    return {
        "cases": [
            {
                "name": o.case.name,
                "steps": {name: [asdict(s) for s in steps] for name, steps in o.steps.items()},
            }
            for o in outcomes
        ],
    }


def chosen(only: str) -> Iterator[Case]:
    """Cases whose name holds these words."""
    for case in CASES:
        if all(word in case.name for word in only.split()):
            yield case
