"""Checks memory and speed on a CUDA card, in one call: scripts/gpu_check.sh.

Nearly every part is a run of the trainer on GPT-2 124 M with random weights, whose texts are all as long as
they may be. On a CPU the same parts run small, to be tested.
"""

import gc
import json
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from loguru import logger
from torch.utils.benchmark import Timer

from benchmarks.models import GPT2_124M, GPT2_MINUTE, LIKE_ROOK_TINY, write_model
from benchmarks.results import CONSOLE, conclude, in_turns, table, write
from benchmarks.speed import CONTENDERS, Case, race
from grpo.config import Config
from grpo.config.groups import BUNDLED, LossSettings, Precision, SamplingSettings
from grpo.config.sizes import parse_size
from grpo.data import load_prompts
from grpo.learning.loss import loss_counts
from grpo.learning.objectives import accumulate_grpo
from grpo.logs.tracking import MEMORY_FILE, METRICS_FILE, read_lines
from grpo.memory import Fit
from grpo.memory.budget import GB
from grpo.memory.recovery import release_cache
from grpo.model.load import Policy, load_policy
from grpo.model.target import choose_device, compute_dtype
from grpo.model.weights import RolloutModel
from grpo.plan.trace import SCRATCH_BYTES
from grpo.rollout import decoder
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.trainer import Trainer
from grpo.types import Batch, Prompt
from grpo.workbench.check import matmul_rate

ROOT = Path(__file__).parents[2]
Figures = dict[str, Any]
WARM_UP_STEPS = 2
"""First steps, in which kernels are loaded: no part of the speed."""
PROMPT_TOKENS = 60
"""Tokens of a bundled prompt, about."""
TIMED = ("sample", "score", "learn", "update")
FULL: Figures = {"steps": 6, "max_new_tokens": 144, "batch_size": 64, "max_batch_size": 1024}
SMALL: Figures = {"steps": 1, "max_new_tokens": 16, "batch_size": 8, "max_batch_size": 16}


def main(output: Path | None = None, small: bool = False, quick: bool = False) -> int:
    """Run all parts, print them, and write them as JSON after each: what ends it early costs one part.

    The exit status is 1 if one failed, or found what cannot be.

    Args:
        output: The JSON file; by default docs/measurements/gpu_CARD.json.
        small: A tiny model and few rows: shows on any machine that the parts work.
        quick: Two minutes: what the card reaches, a step by phase, recorded decoding, two batches.
    """
    on_card = torch.cuda.is_available()
    if not small and not on_card:
        sys.exit("torch sees no CUDA device: choose another build of torch, or try --small.")
    logger.remove()
    logger.add(sys.stderr, level="WARNING", format="{time:HH:mm:ss} {message}")
    device = torch.cuda.get_device_name() if on_card else f"CPU ({platform.machine()})"
    name = re.sub(r"[^A-Za-z0-9]+", "_", device).strip("_")
    file = output or ROOT / "docs" / "measurements" / f"gpu_{name}.json"
    sizes = (8, 16) if small else (64, 512) if quick else (8, 32, 64, 128, 256, 512)
    shape, scale = (GPT2_MINUTE, SMALL) if small else (GPT2_124M, FULL)
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "gpt2", shape)
        config = Config(
            model=str(model),
            runs_dir=Path(folder) / "runs",
            engine="off",
            eval_interval=0,
            checkpoint_interval=0,
            trackers=(),
            **scale,
        )
        parts: dict[str, Callable[[], Any]] = {
            "rates": lambda: _rates(config),
            "rows": lambda: [_row(replace(config, batch_size=n)) for n in sizes],
            "recorded steps": lambda: _recorded(config),
            "invariances": lambda: {name: _invariances(config, name) for name in ("fp64", "fp32", "bf16")},
            "race": lambda: _race(small),
            "limit": lambda: _limited(config, *(("8GB", 2) if small else ("24GB", 100))),
            "recovery": lambda: _recovery(config, "8GB" if small else "24GB"),
        }
        results: Figures = {"device": device, "torch": torch.__version__, "model": model.name}
        results["max_new_tokens"] = config.max_new_tokens
        for name in [*parts][: 4 if quick else None]:
            results[name] = _attempt(name, parts[name])
            write(file, results)
    _show(results)
    CONSOLE.print(f"written: {file}")
    return conclude(verdicts(results))


def _attempt(name: str, part: Callable[[], Any]) -> Any:
    """Returns the figures of a part, or why it failed; nothing of it is left on the card for the next."""
    start = time.monotonic()
    try:
        result = part()
    except Exception as error:  # the other parts are still worth having
        logger.exception("{} failed", name)
        result = {"failed": f"{type(error).__name__}: {error}"}
    gc.collect()
    release_cache()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
    logger.warning("{}: {:.0f} s", name, time.monotonic() - start)
    return result


def train(config: Config, *, bias: float = 1.0) -> Figures:
    """A run, read from what it wrote: where its memory stood, and how fast it was. Bytes, seconds.

    bias: times as high as they should be predictions are, after the warm-up. `phases` has, of each, seconds
    a step (median), and what its tensors add, predicted and measured (last step).
    """
    trainer = Trainer(config)
    trainer.save = lambda **_: None  # type: ignore[method-assign]  # it would outlast the steps
    if bias != 1.0:
        _mispredict(trainer.run.fit, bias)
    for _ in trainer:
        pass
    folder, size = trainer.run.folder, trainer.config.num_rows
    memory = read_lines(folder / MEMORY_FILE)
    metrics = [line for line in read_lines(folder / METRICS_FILE) if "step_time" in line]
    shutil.rmtree(folder)
    timed = metrics[WARM_UP_STEPS:] or metrics
    last = {line["phase"]: line for line in memory if line["step"] == memory[-1]["step"]}
    sampled = sum(size * line["completions/mean_length"] for line in timed)
    phases = {
        phase: {
            "seconds": median(line.get(f"timing/{phase}_s", 0.0) for line in timed),
            "predicted_bytes": last[phase]["predicted_bytes"] or 0,
            "measured_bytes": last[phase]["added_bytes"] or 0,
        }
        for phase in TIMED
        if phase in last
    }
    return {
        "batch_size": size,
        "steps": len(metrics),
        "retries": sum(line["retries"] for line in memory),
        "rows": trainer.run.fit.planned(),
        "allocated_bytes": int(GB * max(line["memory/peak_gb"] for line in metrics)),
        "reserved_bytes": int(GB * max(line.get("memory/reserved_gb", 0.0) for line in metrics)),
        "process_bytes": max(line["process_bytes"] for line in memory),
        "samples_per_minute": 60 * size * len(timed) / sum(line["step_time"] for line in timed),
        "tokens_per_second": sampled / max(1e-9, sum(line["timing/sample_s"] for line in timed)),
        "phases": phases,
        "logp_difference": metrics[-1]["sampling/sampling_logp_difference/mean"],
    }


def _mispredict(fit: Fit, factor: float) -> None:
    """From here on what passes take is predicted that many times as high; rows are planned anew by that."""
    honest = fit.predict
    fit.predict = lambda phase, size: factor * honest(phase, size)  # type: ignore[method-assign]
    for phase in fit.planned():
        fit.discard_plan(phase)


def _row(config: Config) -> Figures:
    """A batch all at once, as the well-known recipes do it."""
    rows = config.num_rows
    figures = train(replace(config, rollout_rows=rows, score_rows=rows, train_rows=rows))
    whole = all(planned >= rows for planned in figures["rows"].values())
    status = "split after running out" if figures["retries"] else "fits" if whole else "split as planned"
    # Forward and backward, 6 operations a weight and token (Kaplan et al. 2020); prompts count once a group.
    tokens = rows * (config.max_new_tokens + PROMPT_TOKENS / config.group_size)
    return {**figures, "status": status, "learning_flops": 6 * _num_parameters(config.model) * tokens}


@cache
def _num_parameters(model: str) -> int:
    return sum(p.numel() for p in load_policy(model, torch.device("cpu")).model.parameters())


def _race(small: bool) -> Figures:
    """Samples a minute, and how many times those of TRL with Hugging Face's generate, rewards on."""
    case = Case("GPT-2 124 M on a card", GPT2_124M, 6)
    if small:
        case = Case("small", LIKE_ROOK_TINY, 1, batch_size=8, train_rows=8, max_new_tokens=16)
    contenders = CONTENDERS[:1] if small else CONTENDERS
    with TemporaryDirectory() as folder:
        outcome = race(case, Path(folder), contenders=contenders, device=choose_device().type)
    return {
        "samples_per_minute": 60 * case.batch_size / outcome.seconds("ours"),
        "seconds": {name: outcome.seconds(name) for name in contenders},
        "split": outcome.steps["ours"][-1]["split"],
        **{f"times {other}": outcome.ratio(other) for other in contenders[1:]},
        **{f"memory of {other}": outcome.memory_ratio(other) for other in contenders[1:]},
    }


def _limited(config: Config, limit: str, many: int) -> Figures:
    """The largest batch that needs no splitting under a limit, for many steps; none may run out."""
    auto = train(replace(config, batch_size="auto", memory_limit=limit))
    long = train(replace(config, batch_size=auto["batch_size"], memory_limit=limit, steps=many))
    held = long["process_bytes"] <= 1.005 * parse_size(limit)
    never = not auto["retries"] and not long["retries"]
    return {"limit": limit, "auto": auto, "long": long, "zero out of memory": never, "limit held": held}


def _recovery(config: Config, limit: str) -> Figures:
    """Predictions 70 % too low: the plan is too large, memory does run out, the run goes on."""
    return train(replace(config, batch_size=config.max_batch_size, memory_limit=limit), bias=0.3)


def _rates(config: Config) -> Figures:
    """Measures the card's best: operations a second of products, bytes a second of copies."""
    device = choose_device(config.device)
    source = torch.empty(2**28 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    copy = Timer("target.copy_(source)", globals={"source": source, "target": torch.empty_like(source)})
    copied = 2 * source.nbytes / copy.blocked_autorange(min_run_time=0.3).median
    flops = matmul_rate(device, compute_dtype(config.precision, device))
    return {"flops": flops, "copied_bytes_per_s": copied}


def _sample(policy: Policy, prompts: list[Prompt], rows: int, tokens: int, *, at_once: int) -> Batch:
    uniforms = step_uniforms(rows, tokens, seed=0, step=1)
    sampler = RolloutModel(policy.model, policy.target.dtype).model
    settings = SamplingSettings(max_new_tokens=tokens)
    return rollout(sampler, policy.tokenizer, prompts, uniforms, settings, rows=at_once)


def _recorded(config: Config, rounds: int = 5) -> Figures:
    """Seconds of a rollout with recorded steps and with plain ones, in turns (medians); equal completions."""
    policy = load_policy(config.model, choose_device(config.device), config.precision)
    rows, tokens = config.num_rows, config.max_new_tokens
    prompts = [Prompt(str(n), "P: 8/8/8/8/8/8/8/8 w - - 0 1", {}) for n in range(config.num_prompts)]

    def timed() -> tuple[float, list[str]]:
        start = time.perf_counter()
        made = _sample(policy, prompts, rows, tokens, at_once=rows)
        return time.perf_counter() - start, made.texts

    def plain() -> tuple[float, list[str]]:
        with mock.patch.object(decoder, "step_graphs", lambda model: None):
            return timed()

    results = in_turns({"recorded": timed, "plain": plain}, 1 + rounds)
    (_, texts), (_, others) = results["recorded"][-1], results["plain"][-1]
    seconds = {name: median(took for took, _ in pairs[1:]) for name, pairs in results.items()}
    return {"equal": sum(map(str.__eq__, texts, others)) / rows, **seconds}


def _invariances(config: Config, precision: Precision, rows: int = 32, tokens: int = 48) -> Figures:
    """Compares a step of the bundled model done at once with one done in parts.

    same: share of tokens sampled alike; gradient: largest difference, of the gradient's norm.
    """
    policy = load_policy(BUNDLED, choose_device(config.device), precision)
    prompts = load_prompts("bundled", policy_share=0.5, seed=0).draw(rows // 8)
    whole, parts = (_sample(policy, prompts, rows, tokens, at_once=number) for number in (rows, 8))
    pairs = zip(whole.by_row(whole.ids), parts.by_row(parts.ids), strict=True)
    same = sum(int((one[: len(other)] == other[: len(one)]).sum()) for one, other in pairs)
    advantages, counts = torch.linspace(-1, 1, rows, dtype=torch.float64), loss_counts(whole, tokens)
    batch = whole.with_columns(credit=advantages[whole.row], ref_logp=whole.sampler_logp)

    def gradient(at_once: int) -> torch.Tensor:
        policy.model.zero_grad(set_to_none=True)
        accumulate_grpo(
            policy.model,
            batch,
            counts,
            settings=LossSettings(kl_coef=0.1),
            temperature=1.0,
            dtype=policy.target.dtype,
            rows=at_once,
        )
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])

    at_once = gradient(rows)
    differences = [(gradient(number) - at_once).norm() / at_once.norm() for number in (8, 3)]
    return {"same": same / len(whole.ids), "gradient": float(max(differences))}


def _show(results: Figures) -> None:
    rates, rows = results["rates"], results["rows"]
    lines = [f"{results['device']}, torch {results['torch']}"]
    if "flops" in rates:
        products, copies = rates["flops"] / 1e12, rates["copied_bytes_per_s"] / 1e9
        lines.append(f"products {products:.1f} TFLOP/s, copies {copies:.0f} GB/s")
    if isinstance(rows, list):
        CONSOLE.print(table(map(_row_of_table, rows)))
        lines.append(f"sampler and scorer differ by {rows[-1]['logp_difference']:.2g} nats a token")
        if "flops" in rates:
            share = rows[-1]["learning_flops"] / rows[-1]["phases"]["learn"]["seconds"] / rates["flops"]
            lines.append(
                f"learning of {rows[-1]['batch_size']} rows reaches {share:.0%} of the products' rate"
            )
    parts = (name for name, part in results.items() if isinstance(part, dict) and name != "rates")
    lines += [f"{name}: {json.dumps(results[name])}" for name in parts]
    CONSOLE.print("\n".join(lines), highlight=False, soft_wrap=True)


def _row_of_table(row: Figures) -> dict[str, str]:
    phases, learn = row["phases"], row["phases"]["learn"]
    shown = {"rows": str(row["batch_size"]), "samples a minute": f"{row['samples_per_minute']:,.0f}"}
    shown |= {f"{name}, s": f"{phase['seconds']:.3f}" for name, phase in phases.items()}
    shown["learn adds, GB"] = f"{learn['measured_bytes'] / GB:.2f}"
    shown["predicted, of it"] = f"{learn['predicted_bytes'] / max(1, learn['measured_bytes']):.3f}"
    for name in ("allocated", "reserved", "process"):
        shown[f"{name}, GB"] = f"{row[f'{name}_bytes'] / GB:.1f}"
    return {**shown, "status": row["status"]}


def verdicts(results: Figures) -> dict[str, bool]:
    """Returns the verdicts that hold on any device, of the parts that were run."""
    parts = {name: part for name, part in results.items() if isinstance(part, dict | list)}
    done = {name: part for name, part in parts.items() if "failed" not in part}
    sentences = {f"{name} ran": name in done for name in parts}
    phases = [phase for row in done.get("rows", ()) for phase in row["phases"].values()]
    if phases:
        beyond = max(phase["measured_bytes"] - 1.1 * phase["predicted_bytes"] for phase in phases)
        sentences["a phase takes at most 10 % and 2 MB more than was predicted"] = beyond <= SCRATCH_BYTES
    if "recorded steps" in done and not results["device"].startswith("CPU"):  # where nothing is recorded
        sentences["recorded steps sample the same"] = done["recorded steps"]["equal"] == 1
    if "invariances" in done:
        exact, fp32 = (done["invariances"][name] for name in ("fp64", "fp32"))
        sentences["in float64 a step in parts is the step"] = exact["same"] == 1 and exact["gradient"] < 1e-10
        sentences["in fp32 it is, to rounding"] = fp32["same"] > 0.99 and fp32["gradient"] < 1e-4
    if "limit" in done:
        sentences["the largest batch never runs out of memory"] = done["limit"]["zero out of memory"]
        sentences["a process stays below its limit"] = done["limit"]["limit held"]
    return sentences
