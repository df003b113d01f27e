"""One side of the race in a process of its own: a step for each line it is sent.

    python -m benchmarks.contender '{"name": "ours", …}'

Prints a line of JSON when it is ready, and one after each step. Nothing else comes on its stdout.
"""

import json
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo.environment import set_library_defaults

Name = Literal["ours", "trl", "trl defaults"]
REWARDS = "policy", "environment"


@dataclass(frozen=True)
class Work:
    """What all contenders do the same of. prompts: JSON lines with the columns that rewards read."""

    name: Name
    model: str
    prompts: str
    folder: str
    steps: int
    device: str = "cpu"
    batch_size: int = 64
    group_size: int = 8
    max_new_tokens: int = 144
    train_rows: int = 64
    kl_coef: float = 0.02
    learning_rate: float = 1e-5


class Turns:
    """Waits for a word before each step, and reports after it."""

    def __init__(self, out: Any) -> None:
        self._out, self._start, self._peak = out, 0.0, 0

    def say(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self._out, flush=True)

    def wait(self) -> None:
        if not sys.stdin.readline().strip():
            sys.exit(0)
        self._start = time.perf_counter()

    def report(self, new_tokens: float, split: dict[str, float], peak: float = 0.0) -> None:
        """One step: its tokens a completion, and seconds of its parts where they are known.

        peak_bytes: of all steps so far; resident on the host, or, on a card, what torch has reserved there.
        """
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a step ends with its last kernel
        seconds = time.perf_counter() - self._start
        self._peak = max(self._peak, int(peak), peak_bytes())
        self.say({"seconds": seconds, "new_tokens": new_tokens, "split": split, "peak_bytes": self._peak})


def peak_bytes() -> int:
    """Most memory this process held since peaks were reset: on the card it has used, or else the host."""
    import resource

    import torch

    if torch.cuda.is_available() and torch.cuda.max_memory_reserved():
        return torch.cuda.max_memory_reserved()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read(work: Work) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(work.prompts).read_text().splitlines()]


def run_ours(work: Work, turns: Turns) -> None:
    """Our trainer as train_lean.py runs it, less evaluation and checkpoints."""
    from grpo.config import Config
    from grpo.memory.budget import GB
    from grpo.trainer import Trainer

    config = Config(
        steps=work.steps, batch_size=work.batch_size, group_size=work.group_size, model=work.model,
        device=work.device, policy_share=0.5, heldout_share=0.0, engine="off", reward=REWARDS,
        max_new_tokens=work.max_new_tokens, kl_coef=work.kl_coef, learning_rate=work.learning_rate,
        train_rows=work.train_rows, score_rows=work.train_rows, eval_interval=0, checkpoint_interval=0,
        runs_dir=Path(work.folder), name="ours", trackers=(),
    )  # fmt: skip
    # Of positions our own source makes the prompts, which are the same.
    positions = [{k: v for k, v in row.items() if k != "prompt" and v is not None} for row in read(work)]
    trainer = Trainer(config, prompts=positions)
    turns.say({"ready": True})
    turns.wait()
    for step in trainer:
        split = {name: value for name, value in step.metrics.items() if name.startswith("timing/")}
        # The trainer resets peaks at each phase, those of the system too.
        turns.report(step.metrics["completions/mean_length"], split, GB * step.metrics["memory/peak_gb"])
        turns.wait()


def run_trl(work: Work, turns: Turns, *, best: bool) -> None:
    """TRL's GRPOTrainer: in its best configuration, or as it comes.

    Best is bf16 where the machine multiplies in it, as ours does, the fused GELU, and no dropout.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    from grpo.data.reward_files import load_reward
    from grpo.model.target import compute_dtype

    changes: dict[str, Any] = {"activation_function": "gelu_pytorch_tanh" if best else "gelu_new"}
    changes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0 if best else 0.1)
    options: dict[str, Any] = {"bf16": False}
    if best:
        lower = compute_dtype("auto", torch.device(work.device)) == torch.bfloat16
        options = {"bf16": lower, "gradient_checkpointing": False}
    config = AutoConfig.from_pretrained(work.model, **changes)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.wait()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **__: Any) -> None:
            if "completions/mean_length" in logs:  # of a step, and not of the end
                turns.report(logs["completions/mean_length"], {})

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.model, config=config, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        reward_funcs=[load_reward(name)[1] for name in REWARDS],
        train_dataset=Dataset.from_list(read(work)),
        args=GRPOConfig(
            output_dir=f"{work.folder}/trl", per_device_train_batch_size=work.train_rows,
            gradient_accumulation_steps=work.batch_size // work.train_rows, num_generations=work.group_size,
            max_completion_length=work.max_new_tokens, max_steps=work.steps, beta=work.kl_coef,
            learning_rate=work.learning_rate, logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=work.device == "cpu", disable_tqdm=True, seed=0, **options,
        ),
        callbacks=[Steps()],
    )  # fmt: skip
    turns.say({"ready": True})
    trainer.train()


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    if work.name == "ours":  # as train_lean.py does
        set_library_defaults()
    turns = Turns(sys.stdout)
    with redirect_stdout(sys.stderr):
        if work.name == "ours":
            run_ours(work, turns)
        else:
            run_trl(work, turns, best=work.name == "trl")


if __name__ == "__main__":
    main()
