"""Runs of stock TRL and of ours, each in a process of its own, with or without a limit on its memory."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.random_gpt2 import make_random_gpt2

ROOT = Path(__file__).parents[2]
SHAPE_OF_10M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 512}
Kind = Literal["stock", "ours"]


@dataclass(frozen=True)
class Run:
    """One run's settings. limit_mb is of private writable memory (RLIMIT_DATA); 0: none."""

    kind: Kind = "ours"
    batch: int = 128
    tokens: int = 64
    steps: int = 3
    limit_mb: int = 0
    """Beyond what the process holds before the trainer is made."""
    growing: bool = False
    """Completions are an eighth of `tokens` in the first step, and grow until the last."""
    fixed: bool = False
    """Of ours: all rows at once, as stock does."""
    accumulation: int = 1


@dataclass
class Outcome:
    """What became of it."""

    steps_s: list[float]
    peak_mb: float
    rows: list[int]
    """At once, in learning, by step."""
    said: str
    """The last line of its error, if any."""

    @property
    def done(self) -> int:
        return len(self.steps_s)


def outcome(run: Run) -> Outcome:
    """Of the run, in a process of its own."""
    given = [
        f"--{name.replace('_', '-')}={value}" for name, value in asdict(run).items() if value is not None
    ]
    given = [each for each in given if not each.endswith(("=True", "=False"))]
    given += [f"--{name}" for name in ("growing", "fixed") if getattr(run, name)]
    command = [sys.executable, str(ROOT / "scripts/benchmark_trl.py"), "one", *given]
    done = subprocess.run(command, capture_output=True, text=True)
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step_s"')]
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "DoesNotFit" in line]
    said = errors[-1] if errors else ("" if done.returncode == 0 else done.stderr[-300:])
    return Outcome(
        [step["step_s"] for step in steps], max((step["peak_mb"] for step in steps), default=0.0),
        [step["rows"] for step in steps], said if done.returncode else "",
    )  # fmt: skip


def perform(run: Run) -> None:
    """In this process: a line of JSON for each step."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    from grpo.memory import Device
    from grpo.trl import GRPOTrainer

    folder = make_random_gpt2(Path(tempfile.mkdtemp()) / "model", **SHAPE_OF_10M)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    board = "8/8/1k6/8/8/2K5/7R/8 w - - 0 1 "
    prompts = Dataset.from_dict({"prompt": [f"P: {board * 3}"[:90]] * 64})
    torch.ones(512, 512) @ torch.ones(512, 512)  # threads take their stacks before there is a limit
    tokenizer([board] * 8)
    if run.limit_mb:
        private = Device(limit_bytes=sys.maxsize).memory().ours_bytes  # as a limit counts it
        resource.setrlimit(resource.RLIMIT_DATA, (private + run.limit_mb * 2**20,) * 2)
    rows = run.batch // run.accumulation
    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1, max_steps=run.steps, learning_rate=1e-6, disable_dropout=True,
        per_device_train_batch_size=rows, num_generations=8, beta=0.0,
        gradient_accumulation_steps=run.accumulation, gradient_checkpointing=False,
        max_completion_length=run.tokens, generation_kwargs={"min_new_tokens": run.tokens},
    )  # fmt: skip

    class Told(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = time.perf_counter()
            if run.growing:
                grown = run.tokens // 8 + run.tokens * 7 * state.global_step // (8 * (run.steps - 1))
                trainer.generation_config.max_new_tokens = trainer.generation_config.min_new_tokens = grown

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(json.dumps({
                "step_s": time.perf_counter() - self.began, "peak_mb": device.read().peak_bytes / 2**20,
                "rows": int((trainer._metrics["train"].get("memory/learn_rows") or [rows])[-1]),
            }), flush=True)  # fmt: skip

    options = {} if run.kind == "stock" else {"memory_utilization": 0.98}
    kind = trl.GRPOTrainer if run.kind == "stock" else GRPOTrainer
    trainer = kind(
        model=model, processing_class=tokenizer, args=settings, callbacks=[Told()],
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        train_dataset=prompts, **options,
    )  # fmt: skip
    device: Any = Device() if run.kind == "stock" else trainer.fit.device  # which resets the system's peaks
    if run.fixed:
        trainer.fit.plan = lambda phase, batch, like="": batch.rows
    trainer.train()
