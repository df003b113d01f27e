"""Speed and memory of a training step beside TRL's: contenders are processes that take turns, step by step.

All get the same prompts, as many of each of the two tasks. They are of one length, as TRL mis-scores prompts
of mixed lengths on GPT-2. Where texts end by themselves they are not of one length, though of one kind:
speeds are compared by the seconds a token takes.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from loguru import logger
from transformers import AutoTokenizer, PretrainedConfig

from benchmarks.contender import Name, Work
from benchmarks.models import GPT2_124M, LIKE_ROOK_TINY, write_model
from benchmarks.results import in_turns, times_as_much
from grpo.data import load_prompts
from grpo.data.source import CHESS_COLUMNS
from grpo.model.names import BUNDLED_FOLDER
from grpo.types import Prompt

CONTENDERS: tuple[Name, ...] = ("ours", "trl", "trl defaults")
LEAST, MOST_MEMORY = 1.0, 0.8
"""Times TRL's speed, of its memory, on any machine: two AVX2 cores in fp32 have 1.23, 0.68 of its best."""
WARM_UP_STEPS = 3
"""Untimed first steps of ours, which counts memory operation by operation in two; TRL's has one."""


@dataclass(frozen=True)
class Case:
    """One row of the table. shape: of random weights; None: rook-tiny itself."""

    name: str
    shape: PretrainedConfig | None
    rounds: int
    train_rows: int = 64
    batch_size: int = 64
    max_new_tokens: int = 144


CASES = (
    Case("rook-tiny's shape, 144 tokens each", LIKE_ROOK_TINY, 5),
    Case("rook-tiny, half policy, natural ends", None, 5),
    Case("GPT-2 124 M, 144 tokens each", GPT2_124M, 2, train_rows=16),
)


@dataclass(frozen=True)
class RaceOutcome:
    """Every contender's steps, round by round, as `Turns.report` says them."""

    case: Case
    steps: Mapping[Name, list[dict[str, Any]]]

    def ratio(self, other: Name) -> tuple[float, float, float]:
        """Seconds a token of `other` over ours, and its 95 % interval."""
        theirs, ours = (
            [step["seconds"] / step["new_tokens"] for step in self.steps[name]] for name in (other, "ours")
        )
        return times_as_much(theirs, ours)

    def memory_ratio(self, other: Name) -> float:
        return self.peak_bytes("ours") / self.peak_bytes(other)

    def peak_bytes(self, name: Name) -> int:
        return self.steps[name][-1]["peak_bytes"]

    def seconds(self, name: Name) -> float:
        """The median seconds of a step."""
        return median(step["seconds"] for step in self.steps[name])


class Worker:
    """A contender's process."""

    def __init__(self, work: Work) -> None:
        self._log = open(Path(work.folder, f"{work.name.replace(' ', '-')}.log"), "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contender", json.dumps(asdict(work))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def step(self, word: str = "step\n") -> dict[str, Any]:
        """Returns its report of the next step. RuntimeError, with its last words, if it has died."""
        self._process.stdin.write(word)
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            self._log.seek(0)
            raise RuntimeError(f"a contender died:\n{self._log.read()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


def race(
    case: Case, folder: Path, *, contenders: Sequence[Name] = CONTENDERS, device: str = "cpu"
) -> RaceOutcome:
    """Every contender's steps, in rounds. folder: for models, prompts and runs."""
    model = write_model(folder / "model", case.shape) if case.shape else BUNDLED_FOLDER
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows()), encoding="utf-8")
    work = Work(
        "ours",
        str(model),
        str(prompts),
        str(folder),
        WARM_UP_STEPS + case.rounds + 1,
        device,
        batch_size=case.batch_size,
        max_new_tokens=case.max_new_tokens,
        train_rows=case.train_rows,
    )
    with ExitStack() as stack:
        workers: dict[Name, Worker] = {}
        for name in contenders:
            worker = workers[name] = Worker(replace(work, name=name))
            stack.callback(worker.close)
            worker.step("")  # that it is ready
        for name, worker in workers.items():
            for _ in range(WARM_UP_STEPS if name == "ours" else 1):
                worker.step()
        steps = in_turns({name: worker.step for name, worker in workers.items()}, case.rounds)
    outcome = RaceOutcome(case, steps)
    logger.info("{}: {}", case.name, {name: f"{outcome.seconds(name):.2f} s" for name in contenders})
    return outcome


def prompt_rows(count: int = 128) -> list[dict[str, Any]]:
    """Bundled prompts of the length that most pairs have, policy and environment in turn: equal columns."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    by_length: dict[int, dict[str, list[Prompt]]] = defaultdict(lambda: {"policy": [], "environment": []})
    for prompt in load_prompts("bundled", policy_share=0.5, seed=0).draw(8000):
        by_length[len(tokenizer(prompt.text)["input_ids"])][prompt.task].append(prompt)
    most = max(by_length.values(), key=lambda kinds: min(map(len, kinds.values())))
    pairs = zip(*most.values(), strict=False)
    chosen = [prompt for pair in pairs for prompt in pair][:count]
    assert len(chosen) == count
    names = [name for name in CHESS_COLUMNS if name != "task"]
    return [{"prompt": prompt.text} | {name: prompt.columns.get(name) for name in names} for prompt in chosen]


def race_rows(outcomes: Sequence[RaceOutcome]) -> Iterator[dict[str, str]]:
    """For the table."""
    for outcome in outcomes:
        rate = outcome.case.batch_size / outcome.seconds("ours")
        row = {"work": outcome.case.name, "samples a second": f"{rate:.1f}"}
        others = [name for name in CONTENDERS[1:] if name in outcome.steps]
        for other in others:
            ratio, least, most = outcome.ratio(other)
            interval = f" ({least:.2f} to {most:.2f})" if len(outcome.steps[other]) > 1 else ""
            row[f"against {other}"] = f"{ratio:.2f}×{interval}"
        row["peak memory, GB"] = f"{outcome.peak_bytes('ours') / 2**30:.2f}"
        yield row | {f"of {other}'s": f"{outcome.memory_ratio(other):.2f}" for other in others}


def race_verdicts(outcomes: Sequence[RaceOutcome]) -> dict[str, bool]:
    """Whether we are no slower than the others anywhere, and hold less, by the sentence that says so."""
    verdicts = {}
    for outcome in outcomes:
        for other in CONTENDERS[1:]:
            if other in outcome.steps:
                ratio, share = outcome.ratio(other)[0], outcome.memory_ratio(other)
                sentence = f"{outcome.case.name}: {ratio:.2f} times {other} (at least {LEAST:g})"
                verdicts[sentence] = ratio >= LEAST
                sentence = f"{outcome.case.name}: {share:.2f} of {other}'s memory (at most {MOST_MEMORY:g})"
                verdicts[sentence] = share <= MOST_MEMORY
    return verdicts
