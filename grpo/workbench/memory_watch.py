"""Is a run's memory growing? For monitor_memory.py: a verdict, a plot and JSON.

Either a run is trained and watched from within, where tensors can be counted and culprits named, or one that
somebody else trains is judged by what its files say until now.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from loguru import logger
from rich.console import Console

from grpo.config import Config
from grpo.errors import UserError
from grpo.files import shown
from grpo.logs.tracking import MEMORY_FILE, METRICS_FILE, NewLines, read_lines
from grpo.memory.budget import GB, readable
from grpo.memory.leaks.leak import MIN_STEPS, LeakVerdict, LeakWatch, MemorySample, detect_leak
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer
from grpo.workbench.pictures import picture

PLOT, VERDICT = "memory.png", "leak.json"
SHOWN_EVERY = 10


def watch_training(config: Config, console: Console, stop: StopRequest) -> tuple[LeakVerdict, Path]:
    """Train, with every step's memory sampled and each tenth's shown; the verdict and the run folder."""
    if config.steps < MIN_STEPS:
        console.print(
            f"there will be no verdict: a trend needs {MIN_STEPS} steps, and these are {config.steps}",
            highlight=False,
        )
    with open_run(config) as run, LeakWatch(run.device.device) as watch:
        logger.info("run folder: {}", shown(run.folder))
        new_lines = NewLines(run.folder / MEMORY_FILE)  # all lines again and again would grow themselves
        tokens_before = 0
        trainer = Trainer(run, stop=stop)
        for step in trainer:
            watch.sample(step.number, tokens=trainer.num_tokens - tokens_before)
            tokens_before = trainer.num_tokens
            lines = new_lines()
            if step.number in (1, config.steps) or step.number % SHOWN_EVERY == 0:
                phases = (f"{line['phase']} {readable(line['process_bytes'])}" for line in lines)
                console.print(f"step {step.number}: {', '.join(phases)}", highlight=False)
        return report(watch.verdict(), watch.samples, run.folder), shown(run.folder)


def judge_run(folder: Path) -> LeakVerdict:
    """The verdict over the steps that are in a run's files now. ValueError for a folder without any."""
    if not (folder / MEMORY_FILE).is_file():
        raise UserError(f"attach is {str(folder)!r}, which holds no {MEMORY_FILE}: give a run's folder.")
    process = {line["step"]: line["process_bytes"] for line in read_lines(folder / MEMORY_FILE)}
    samples, tokens_before = list[MemorySample](), 0
    for line in read_lines(folder / METRICS_FILE):
        if "num_tokens" not in line:
            continue
        step, tokens = line["step"], int(line["num_tokens"] - tokens_before)
        tokens_before = line["num_tokens"]
        if "memory/reserved_gb" not in line:  # a host's, where nobody counts tensors
            held = line.get("memory/process_gb", line.get("memory/allocated_gb", 0.0))  # its name before
            samples.append(MemorySample(step, int(held * GB), tokens=tokens))
        elif step in process:  # by the last phase of the step
            allocated, reserved = (int(line[f"memory/{name}_gb"] * GB) for name in ("allocated", "reserved"))
            samples.append(MemorySample(step, process[step], allocated, reserved, tokens))
    return report(detect_leak(samples), samples, folder)


def report(verdict: LeakVerdict, samples: Sequence[MemorySample], folder: Path) -> LeakVerdict:
    """Write the verdict with its samples, and the plot, into the run folder."""
    content = {**verdict.to_dict(), "samples": [sample.__dict__ for sample in samples]}
    (folder / VERDICT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    phases: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in read_lines(folder / MEMORY_FILE):
        phases[line["phase"]].append((line["step"], line["process_bytes"] / GB))
    with picture(folder / PLOT, (8, 4.5)) as axes:
        for phase, points in phases.items():
            axes.plot(*zip(*points, strict=True), linewidth=1, label=f"peak, {phase}")
        steps = [sample.step for sample in samples]
        axes.plot(steps, [sample.device_used_bytes / GB for sample in samples], "k", label="after the step")
        if all(sample.allocated_bytes is not None for sample in samples):
            held = [(sample.allocated_bytes or 0) / GB for sample in samples]
            axes.plot(steps, held, "k:", label="tensors after the step")
        axes.set(xlabel="step", ylabel="GB (2**30 bytes)", ylim=(0, None))
        axes.set_title(str(verdict).splitlines()[0], loc="left")
        axes.legend(frameon=False, ncols=2)
    return verdict
