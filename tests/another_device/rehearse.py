"""Runs on the other device and on the CPU, in float64."""

import dataclasses
import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from conftest import untraced
from loguru import logger
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from another_device import NAME, AnotherDevice
from grpo import phases
from grpo.config import Config
from grpo.learning.objectives import accumulate_grpo
from grpo.logs.tracking import COMPLETIONS_FILE, MEMORY_FILE, METRICS_FILE, read_lines
from grpo.run.interrupt import StopRequest
from grpo.run.setup import Run, open_run
from grpo.scoring.packing import streams
from grpo.trainer import Trainer

RICH = {
    "num_iterations": 2,
    "refill_groups": 1,
    "importance_cap": 2.0,
    "mask_truncated": True,
    "kl_target": 0.01,
    "gradient_checkpointing": "full",
    "reference_sync": 1,
    "lora_rank": 2,
}


def train(
    config: Config, prepare: Callable[[Run], object] = lambda run: None, *, traced: bool = False
) -> dict[str, Any]:
    """Returns all that a run leaves: weights, texts, held-out rewards, and of each phase's memory the last
    record.

    traced: with the passes that a run begins with, and not with a plan that is made up.
    """
    with nullcontext() if traced else untraced(), open_run(config) as run:
        prepare(run)
        Trainer(run, Console(quiet=True)).train(StopRequest())
        weights = torch.cat([p.detach().cpu().flatten() for p in run.policy.model.parameters()])
    lines = read_lines(run.folder / MEMORY_FILE)
    return {
        "weights": weights,
        "texts": [line["completion"] for line in read_lines(run.folder / COMPLETIONS_FILE)],
        "held out": [line.get("eval_reward") for line in read_lines(run.folder / METRICS_FILE)],
        "retries": sum(line["retries"] for line in lines),
        "phases": {line["phase"]: line for line in lines},
    }


WAIT_FOR = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.bincount,
    torch.ops.aten.equal,
)
"""Operations whose result, or its shape, the host has to know."""


class Copies(TorchDispatchMode):
    """Counts copies between host and device, and how often the host waits for a number or a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = self.to_host = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            target, source = (args[0], args[1]) if len(args) > 1 else (made, args[0])
            self.to_device += source.device.type == "cpu" and target.device.type == NAME
            self.to_host += source.device.type == NAME and target.device.type == "cpu"
        if func.overloadpacket in WAIT_FOR:
            self.waits += args[0].device.type == NAME
        return made


def copies_of_learning(config: Config) -> dict[str, int]:
    """Between host and device, in all steps of a run, and how many streams there were."""
    count = {"streams": 0, "steps": 0}
    copies = Copies()

    def accumulate(model: Any, batch: Any, counts: Any, **settings: Any) -> Any:
        packing = {name: settings[name] for name in ("rows", "longest", "of_equal_rows")}
        count["streams"] += len(list(streams(batch, **packing)))
        count["steps"] += 1
        with copies:
            return accumulate_grpo(model, batch, counts, **settings)

    phases.accumulate_grpo = accumulate
    train(config)
    phases.accumulate_grpo = accumulate_grpo
    return {**count, "to device": copies.to_device, "to host": copies.to_host, "waits": copies.waits}


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    weights, others = one.pop("weights"), other["weights"]
    return {
        "weights apart": float((weights - others).norm() / others.norm()),
        "same texts": one.pop("texts") == other["texts"],
        "same held out": one["held out"] == other["held out"],
        **one,
    }


def rehearse(rank: int, library: Path, model: Path, prompts: Path, folder: Path) -> dict[str, Any]:
    """Returns the outcome of all of them."""
    pretend = AnotherDevice(library)
    logger.remove()
    said: list[str] = []
    logger.add(said.append, format="{message}")
    cpu = Config(
        steps=3,
        batch_size=16,
        group_size=4,
        model=str(model),
        device="cpu",
        precision="fp64",
        prompts=str(prompts),
        heldout_share=0.2,
        engine="off",
        max_new_tokens=16,
        eval_prompts=4,
        eval_interval=2,
        learning_rate=1e-3,
        runs_dir=folder,
        trackers=(),
        checkpoint_interval=0,
        logged_completions=16,
    )

    def on(device: str, config: Config = cpu, **changes: Any) -> Config:
        return dataclasses.replace(config, device=device, **changes)

    found: dict[str, Any] = {}
    plain = train(on("cpu"))
    found["plain"] = here = compared(train(on(NAME), traced=True), plain)
    found["copies"] = copies_of_learning(on(NAME, train_rows=4))
    rich = dataclasses.replace(cpu, name="rich", **RICH)
    train(on(NAME, rich, steps=2))
    resumed = train(on(NAME, rich, resume=folder / "rich"))
    found["rich, resumed"] = compared(resumed, train(on("cpu", rich, name="rich on the CPU")))

    largest, small = (here["phases"][phase]["process_bytes"] for phase in ("learn", "sample"))

    def less_than_it_says(run: Run) -> None:
        pretend.set_limit((largest + small) // 2)

    found["short"] = compared(train(on(NAME), less_than_it_says), plain)
    gc.collect()
    found["left behind"] = pretend.allocated()
    pretend.set_memory(small // 3)
    try:
        train(on(NAME))
    except ValueError as error:
        found["too small"] = str(error)
    return {**found, "said": [str(line).strip() for line in said]}
