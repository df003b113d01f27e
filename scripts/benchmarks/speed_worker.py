"""One contender of the speed benchmark in a process of its own: a step for each line it is sent.

    python -m benchmarks.speed_worker '{"contender": "ours", …}'

Prints a line of JSON after each step, and one when it is ready. Nothing else comes on its stdout.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from grpo.environment import restart_without_thread_cache, set_library_defaults

Contender = Literal["ours", "trl", "trl defaults"]


@dataclass(frozen=True)
class Work:
    """What all contenders do the same of. Prompts are JSON lines with the columns rewards read."""

    contender: Contender
    model: str
    prompts: str
    folder: str
    batch_size: int = 64
    group_size: int = 8
    max_new_tokens: int = 144
    train_rows: int = 64
    steps: int = 8
    kl_coef: float = 0.02
    learning_rate: float = 1e-5
    threads: int = 2
    device: str = "cpu"
    has_own_reward: bool = False
    """`OWN_REWARD` in `folder`, not the two of chess."""

    @property
    def rewards(self) -> tuple[str, ...]:
        return (f"{self.folder}/reward.py:variety",) if self.has_own_reward else ("policy", "environment")


@dataclass(frozen=True)
class StepTime:
    """One step: mean lengths of its prompts and completions, where its time went, the process's peak.

    peak_bytes: of all steps so far; resident on the host, or, on a card, what torch has reserved there.
    """

    seconds: float
    prompt_tokens: float
    new_tokens: float
    split: dict[str, float]
    peak_bytes: int


class Gate:
    """Waits for a word before each step, and reports after it."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._start = 0.0

    def wait(self) -> None:
        if not sys.stdin.readline().strip():
            sys.exit(0)
        self._start = time.perf_counter()

    def report(self, prompt_tokens: float, new_tokens: float, split: dict[str, float], peak: int) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a step ends with its last kernel
        seconds = time.perf_counter() - self._start
        self.say(asdict(StepTime(seconds, prompt_tokens, new_tokens, split, peak)))

    def say(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self._out, flush=True)


def peak_bytes() -> int:
    """Most memory this process held since peaks were reset: on the card it has used, or else the host."""
    import resource

    import torch

    if torch.cuda.is_available() and torch.cuda.max_memory_reserved():
        return torch.cuda.max_memory_reserved()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_ours(work: Work, gate: Gate) -> None:
    """Our trainer as train_lean.py runs it, less evaluation and checkpoints."""

    from grpo.config import Config
    from grpo.config.groups import OptimizerSettings, SamplingSettings
    from grpo.learning.loss import LossSettings
    from grpo.run.setup import open_run
    from grpo.run.tracking import METRICS_FILE, NewLines
    from grpo.trainer import Trainer

    config = Config(
        steps=work.steps, batch_size=work.batch_size, group_size=work.group_size, model=work.model,
        device=work.device, prompts=work.prompts, policy_share=0.5, heldout_share=0.0, engine="off",
        reward=work.rewards,
        sampling=SamplingSettings(max_new_tokens=work.max_new_tokens),
        loss=LossSettings(kl_coef=work.kl_coef),
        optimizer=OptimizerSettings(learning_rate=work.learning_rate),
        train_rows=work.train_rows, score_rows=work.train_rows, eval_interval=0, checkpoint_interval=0,
        runs_dir=Path(work.folder), name="ours", trackers=(), max_bad_share=1.0,
    )  # fmt: skip
    with open_run(config) as run:
        gate.say({"ready": True})
        new_lines, seen = NewLines(run.folder / METRICS_FILE), [0.0]
        peak = peak_bytes()

        def after_step() -> None:
            nonlocal peak  # the trainer resets peaks at each phase, those of the system too
            peak = max(peak, peak_bytes(), run.device.read().peak_bytes)
            metrics = new_lines()[-1]
            split = {name: value for name, value in metrics.items() if name.startswith("timing/")}
            new_tokens = metrics["completions/mean_length"]
            prompt_tokens = (metrics["num_tokens"] - seen[-1]) / work.batch_size - new_tokens
            seen.append(metrics["num_tokens"])
            gate.report(prompt_tokens, new_tokens, split, peak)
            gate.wait()

        gate.wait()
        for _ in Trainer(run):
            after_step()


def run_trl(work: Work, gate: Gate, *, best: bool) -> None:
    """TRL's GRPOTrainer: in its best configuration, or as it comes.

    Best is bf16 where the machine multiplies in it, as ours does, the fused GELU, and no dropout.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    from grpo.data.reward_files import load_reward
    from grpo.model.target import compute_dtype

    changes: dict[str, Any] = {}
    if best:
        changes = {"activation_function": "gelu_pytorch_tanh"}
        changes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        changes = {"activation_function": "gelu_new"}
        changes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    config = AutoConfig.from_pretrained(work.model, **changes)
    model = AutoModelForCausalLM.from_pretrained(work.model, config=config, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(work.prompts).read_text().splitlines()]

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            lengths = trainer._metrics["train"].get("completions/mean_length", [0.0])
            gate.report(0.0, lengths[-1], {}, peak_bytes())

    options: dict[str, Any] = {"bf16": False}
    if best:
        lower = compute_dtype("auto", torch.device(work.device)) == torch.bfloat16
        options = {"bf16": lower, "gradient_checkpointing": False}
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(work.model),
        reward_funcs=[load_reward(name)[1] for name in work.rewards],
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=f"{work.folder}/trl", per_device_train_batch_size=work.train_rows,
            gradient_accumulation_steps=work.batch_size // work.train_rows, num_generations=work.group_size,
            max_completion_length=work.max_new_tokens, max_steps=work.steps, beta=work.kl_coef,
            learning_rate=work.learning_rate, logging_steps=1000, save_strategy="no", report_to="none",
            use_cpu=work.device == "cpu", disable_tqdm=True, seed=0, **options,
        ),
        callbacks=[Steps()],
    )  # fmt: skip
    gate.say({"ready": True})
    trainer.train()


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    if work.contender == "ours":  # as train_lean.py does
        restart_without_thread_cache()
        set_library_defaults()
    import torch

    torch.set_num_threads(work.threads)
    gate = Gate(sys.stdout)
    run: dict[str, Callable[[], None]] = {
        "ours": lambda: run_ours(work, gate),
        "trl": lambda: run_trl(work, gate, best=True),
        "trl defaults": lambda: run_trl(work, gate, best=False),
    }
    with redirect_stdout(sys.stderr):
        run[work.contender]()


if __name__ == "__main__":
    main()
