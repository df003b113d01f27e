"""What a CUDA card shows of memory and speed, in one call: scripts/gpu_check.sh.

Nearly every part is a real run of the trainer on GPT-2 124 M with random weights, which seldom end a text,
so that completions are as long as they may be. On a CPU the same parts run small, to be tested.
"""

import gc
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from loguru import logger

from benchmarks.speed import Case, race
from benchmarks.speed_worker import Contender
from grpo.config import Config
from grpo.config.groups import BUNDLED, Precision, SamplingSettings
from grpo.config.sizes import parse_size
from grpo.data import load_prompts
from grpo.learning.loss import LossSettings, loss_counts
from grpo.learning.objectives import GRPOBatch, accumulate_grpo
from grpo.memory import Fit
from grpo.memory.budget import GB
from grpo.memory.recovery import release_cache
from grpo.model.load import RolloutModel, load_policy
from grpo.model.target import choose_device, compute_dtype
from grpo.plan.trace import SCRATCH_BYTES
from grpo.rollout import slots
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.setup import open_run
from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, read_lines
from grpo.trainer import Trainer
from grpo.types import Prompt
from grpo.workbench.check import matmul_rate

WARM_UP_STEPS = 2
"""First steps, in which kernels are loaded: no part of the speed."""
PROMPT_TOKENS = 60
"""Of the bundled prompts, about."""
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16")
TIMED = ("sample", "score", "learn", "update")


@dataclass(frozen=True)
class Trial:
    """One short run: where its memory stood, and how fast it was. Bytes, seconds."""

    batch_size: int
    steps: int
    retries: int
    rows: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    samples_per_minute: float
    tokens_per_second: float
    """Sampled, while sampling."""
    phases: dict[str, dict[str, float]]
    """Of each: seconds a step (median), and what its tensors add, predicted and measured (last step)."""
    logp_difference: float
    """Between sampler and scorer, mean of the last step."""

    @property
    def status(self) -> str:
        if self.retries:
            return "split after running out"
        whole = all(rows >= self.batch_size for rows in self.rows.values())
        return "fits" if whole else "split as planned"


def train(config: Config, *, bias: float = 1.0, after_step: Callable[[], None] = lambda: None) -> Trial:
    """Run the trainer, and read what it wrote; no checkpoint, which would take longer than steps.

    bias: times as high as they should be predictions are, after the warm-up.
    """
    with open_run(config) as run:
        if bias != 1.0:
            _mispredict(run.fit, bias)
        trainer = Trainer(run)
        trainer.save = lambda *, best=False: None  # type: ignore[method-assign]
        for _ in trainer:
            after_step()
        folder, size, rows = run.folder, run.config.num_rows, run.fit.planned()
    memory = read_lines(folder / MEMORY_FILE)
    metrics = [line for line in read_lines(folder / METRICS_FILE) if "step_time" in line]
    shutil.rmtree(folder)
    timed = metrics[WARM_UP_STEPS:] or metrics
    last = {line["phase"]: line for line in memory if line["step"] == memory[-1]["step"]}
    seconds = {
        phase: median(line.get(f"timing/{phase}_s", 0.0) for line in timed)
        for phase in TIMED
        if phase in last
    }
    sampled = sum(size * line["completions/mean_length"] for line in timed)
    return Trial(
        batch_size=size,
        steps=len(metrics),
        retries=sum(line["retries"] for line in memory),
        rows=rows,
        allocated_bytes=int(GB * max(line["memory/peak_gb"] for line in metrics)),
        reserved_bytes=int(GB * max(line.get("memory/reserved_gb", 0.0) for line in metrics)),
        process_bytes=max(line["process_bytes"] for line in memory),
        samples_per_minute=60 * size * len(timed) / sum(line["step_time"] for line in timed),
        tokens_per_second=sampled / max(1e-9, sum(line["timing/sample_s"] for line in timed)),
        phases={
            phase: {
                "seconds": seconds[phase],
                "predicted_bytes": last[phase]["predicted_bytes"] or 0,
                "measured_bytes": last[phase]["added_bytes"] or 0,
            }
            for phase in seconds
        },
        logp_difference=metrics[-1]["sampling/sampling_logp_difference/mean"],
    )


def _mispredict(fit: Fit, factor: float) -> None:
    """From here on what passes take is predicted that many times as high; rows are planned anew by that."""
    honest = fit.predict
    fit.predict = lambda phase, size: factor * honest(phase, size)  # type: ignore[method-assign]
    for phase in fit.planned():
        fit.reconsider(phase)


def check_card(
    config: Config,
    case: Case,
    *,
    contenders: Sequence[Contender],
    batch_sizes: Sequence[int],
    limit: str,
    long_steps: int,
    short_steps: int = 6,
    quick: bool = False,
) -> Iterator[tuple[str, Any]]:
    """(name, result) of each part, also of those that fail. case: what the contenders race at.

    quick: the first five figures alone: rates, a step by phase, recorded decoding, and two batches.
    """
    short = replace(config, steps=short_steps)
    yield "device", _device_name()
    yield "torch", torch.__version__
    yield "model", Path(config.model).name
    yield "max_new_tokens", config.sampling.max_new_tokens
    parts: dict[str, Callable[[], Any]] = {
        "rates": lambda: _rates(config),
        "rows": lambda: [_row(replace(short, batch_size=n)) for n in batch_sizes],
        "recorded steps": lambda: _recorded(config),
        "invariances": lambda: {name: _invariances(config, name) for name in PRECISIONS},
    }
    if not quick:
        parts |= {
            "race": lambda: _raced(case, contenders),
            "whole rollout": lambda: _whole(short, limit, max(batch_sizes)),
            "limit": lambda: _limited(config, limit, long_steps, short_steps),
            "recovery": lambda: _recovery(short, limit),
            "emptied cache": lambda: _emptied(short),
        }
    for name, part in parts.items():
        start = time.monotonic()
        try:
            result = part()
        except Exception as error:  # the other parts are still worth having
            logger.exception("{} failed", name)
            result = {"failed": f"{type(error).__name__}: {error}"}
        _release_card()
        logger.warning("{}: {:.0f} s", name, time.monotonic() - start)
        yield name, result


def _rates(config: Config) -> dict[str, float]:
    """What the card reaches at best: operations a second of products, bytes a second of copies."""
    device = choose_device(config.device)
    dtype = compute_dtype(config.precision, device)
    source = torch.empty(2**28 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)[0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return {"flops": matmul_rate(device, dtype), "copied_bytes_per_s": 2 * source.nbytes / min(seconds)}


def _release_card() -> None:
    """Nothing of one part is left on the card for the next, nor its limit."""
    gc.collect()
    release_cache()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)


def _row(config: Config) -> dict[str, Any]:
    """A batch all at once, as the well-known recipes do it."""
    rows = config.num_rows
    trial = train(replace(config, rollout_rows=rows, score_rows=rows, train_rows=rows))
    parameters = sum(p.numel() for p in load_policy(config.model, torch.device("cpu")).model.parameters())
    # Forward and backward, 6 operations a weight and token (Kaplan et al. 2020); prompts count once a group.
    tokens = rows * (config.sampling.max_new_tokens + PROMPT_TOKENS / config.group_size)
    return {**asdict(trial), "status": trial.status, "learning_flops": 6 * parameters * tokens}


def _raced(case: Case, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Samples a minute, and how many times those of TRL with Hugging Face's generate, rewards on."""
    with TemporaryDirectory() as folder:
        outcome = race(case, Path(folder), contenders=contenders, device=choose_device().type)
    taken = {name: median(step.seconds for step in steps) for name, steps in outcome.steps.items()}
    ratios = {f"times {other}": outcome.ratio(other) for other in contenders[1:]}
    memory = {f"memory of {other}": outcome.memory_ratio(other) for other in contenders[1:]}
    speed = 60 * case.batch_size / taken["ours"]
    return (
        {"samples_per_minute": speed, "seconds": taken, "split": outcome.steps["ours"][-1].split}
        | ratios
        | memory
    )


def _recorded(config: Config, rounds: int = 5) -> dict[str, float]:
    """Seconds of a rollout with recorded steps and with plain ones, in turns (medians); equal completions."""
    policy = load_policy(config.model, choose_device(config.device), config.precision)
    sampler = RolloutModel(policy.model, policy.target.dtype).model
    groups = config.num_rows // config.group_size
    prompts = [Prompt(str(n), "P: 8/8/8/8/8/8/8/8 w - - 0 1", {}) for n in range(groups)]
    uniforms = step_uniforms(config.num_rows, config.sampling.max_new_tokens, seed=0, step=0)

    def timed(name: str) -> list[str]:
        start = time.perf_counter()
        made = rollout(sampler, policy.tokenizer, prompts, uniforms, config.sampling, rows=config.num_rows)
        times[name].append(time.perf_counter() - start)
        return made.completions

    times: dict[str, list[float]] = {"recorded": [], "plain": []}
    for _ in range(1 + rounds):
        recorded = timed("recorded")
        with mock.patch.object(slots, "step_recorder", lambda model: None):
            plain = timed("plain")
    equal = sum(map(str.__eq__, recorded, plain)) / len(plain)
    return {"equal": equal, **{name: median(taken[1:]) for name, taken in times.items()}}


def _invariances(config: Config, precision: Precision, rows: int = 32, tokens: int = 48) -> dict[str, float]:
    """What differs between a step of the bundled model done at once and one done in parts.

    same: share of tokens sampled alike; gradient: largest difference, of the gradient's norm.
    """
    policy = load_policy(BUNDLED, choose_device(config.device), precision)
    sampler = RolloutModel(policy.model, policy.target.dtype).model
    prompts = load_prompts("bundled", policy_share=0.5, seed=0).draw(rows // 8)
    uniforms, settings = step_uniforms(rows, tokens, seed=0, step=1), SamplingSettings(max_new_tokens=tokens)
    whole, parts = (
        rollout(sampler, policy.tokenizer, prompts, uniforms, settings, rows=each) for each in (rows, 8)
    )
    width = min(whole.completion_ids.shape[1], parts.completion_ids.shape[1])
    same = (whole.completion_ids[:, :width] == parts.completion_ids[:, :width]) & whole.mask[:, :width]
    advantages = torch.linspace(-1, 1, rows, dtype=torch.float64)
    counts = loss_counts(whole.mask, tokens)
    batch = GRPOBatch(whole, advantages, whole.mask, counts, ref_logp=whole.sampler_logp)

    def gradient(at_once: int) -> torch.Tensor:
        policy.model.zero_grad(set_to_none=True)
        accumulate_grpo(
            policy.model, batch, settings=LossSettings(kl_coef=0.1), temperature=1.0,
            dtype=policy.target.dtype, rows=at_once,
        )  # fmt: skip
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])

    at_once = gradient(rows)
    differences = [(gradient(each) - at_once).norm() / at_once.norm() for each in (8, 3)]
    return {"same": float(same.sum() / whole.mask.sum()), "gradient": float(max(differences))}


def _whole(config: Config, limit: str, rows: int) -> dict[str, Any]:
    """Whether so many rows are sampled at once under a limit."""
    trial = train(replace(config, batch_size=rows, memory_limit=limit))
    return {"limit": limit, "whole": trial.rows["sample"] == rows, **asdict(trial)}


def _limited(config: Config, limit: str, long_steps: int, short_steps: int) -> dict[str, Any]:
    """The largest batch that needs no splitting under a limit, for many steps; none may run out."""
    auto = train(replace(config, batch_size="auto", memory_limit=limit, steps=short_steps))
    long = train(replace(config, batch_size=auto.batch_size, memory_limit=limit, steps=long_steps))
    held = long.process_bytes <= 1.005 * parse_size(limit)
    return {
        "limit": limit,
        "auto": asdict(auto),
        "long": asdict(long),
        "zero out of memory": not auto.retries and not long.retries,
        "limit held": held,
    }


def _recovery(config: Config, limit: str) -> dict[str, Any]:
    """Predictions 40 % and more too low: the plan is too large, memory does run out, the run goes on."""
    wrong = replace(config, batch_size=config.max_batch_size, memory_limit=limit)
    return asdict(train(wrong, bias=0.3))


def _emptied(config: Config) -> dict[str, Any]:
    """The folk advice of emptying the cache after each step, against leaving it: speed and reserved bytes."""

    def empty() -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    config = replace(config, steps=4 * config.steps)
    kept, emptied = train(config), train(config, after_step=empty)
    return {
        "speed": emptied.samples_per_minute / kept.samples_per_minute,
        "reserved": emptied.reserved_bytes / max(1, kept.reserved_bytes),
    }


def summary(results: dict[str, Any]) -> list[str]:
    """Lines for people."""
    lines = [f"{results['device']}, torch {results['torch']}"]
    rates = results.get("rates", {})
    if "flops" in rates:
        products, copies = rates["flops"] / 1e12, rates["copied_bytes_per_s"] / 1e9
        lines.append(f"products {products:.1f} TFLOP/s, copies {copies:.0f} GB/s")
    if isinstance(results.get("rows"), list):
        lines.append("batch  allocated  reserved  process    samples/min  tokens/s  status")
        for row in results["rows"]:
            sizes = (row[f"{name}_bytes"] / GB for name in ("allocated", "reserved", "process"))
            shown = "  ".join(f"{size:6.2f} GB" for size in sizes)
            speeds = f"{row['samples_per_minute']:11,.0f}  {row['tokens_per_second']:8,.0f}"
            lines.append(f"{row['batch_size']:5}  {shown}  {speeds}  {row['status']}")
        lines += _phase_lines(results["rows"][-1], rates)
    parts = (name for name, part in results.items() if isinstance(part, dict) and name != "rates")
    return lines + [f"{name}: {json.dumps(results[name])}" for name in parts]


def verdicts(results: dict[str, Any]) -> dict[str, bool]:
    """What holds on any device, of the parts that were run."""
    parts = {name: part for name, part in results.items() if isinstance(part, dict | list)}
    done = {name: part for name, part in parts.items() if "failed" not in part}
    found = {f"{name} ran": name in done for name in parts}
    phases = [phase for row in done.get("rows", ()) for phase in row["phases"].values()]
    if phases:
        beyond = max(phase["measured_bytes"] - 1.1 * phase["predicted_bytes"] for phase in phases)
        found["a phase takes at most 10 % and 2 MB more than was predicted"] = beyond <= SCRATCH_BYTES
    if "recorded steps" in done and not results["device"].startswith("CPU"):  # where nothing is recorded
        found["recorded steps sample the same"] = done["recorded steps"]["equal"] == 1
    if "invariances" in done:
        exact, fp32 = (done["invariances"][name] for name in ("fp64", "fp32"))
        found["in float64 a step in parts is the step"] = exact["same"] == 1 and exact["gradient"] < 1e-10
        found["in fp32 it is, to rounding"] = fp32["same"] > 0.99 and fp32["gradient"] < 1e-4
    if "limit" in done:
        found["the largest batch never runs out of memory"] = done["limit"]["zero out of memory"]
        found["a process stays below its limit"] = done["limit"]["limit held"]
    return found


def _phase_lines(row: dict[str, Any], rates: dict[str, float]) -> list[str]:
    """Of the largest batch: each phase's seconds and bytes, and what of the card's products learning is."""
    lines = [f"of {row['batch_size']} rows:  seconds  predicted  measured"]
    for phase, found in row["phases"].items():
        predicted, measured = (found[f"{name}_bytes"] / GB for name in ("predicted", "measured"))
        lines.append(f"  {phase:10} {found['seconds']:9.3f}  {predicted:6.2f} GB  {measured:5.2f} GB")
    lines.append(f"  sampler and scorer differ by {row['logp_difference']:.2g} nats a token")
    if "flops" in rates and row.get("learning_flops"):
        share = row["learning_flops"] / row["phases"]["learn"]["seconds"] / rates["flops"]
        lines.append(f"  learning reaches {share:.0%} of the products' rate")
    return lines


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
