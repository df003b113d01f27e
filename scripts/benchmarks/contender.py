"""One side of the race in a process of its own: a step for each line it is sent.

    python -m benchmarks.contender '{"name": "ours", …}'

Prints a line of JSON when it is ready, and one after each step; sent the word `look`, one with what the
model answers to held-out prompts. Nothing else comes on its stdout.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from grpo.environment import set_library_defaults

Name = Literal["ours", "trl", "trl defaults", "drop-in", "drop-in, skipping"]
"""Our trainer; TRL's in its best configuration, and as it comes; TRL's best with our class, which may skip
groups of equal rewards as our trainer does."""
REWARDS = "policy", "environment"
LOOK_TOKENS = 64
"""The length of answers to held-out prompts: room to finish, whatever room there is in training."""


@dataclass(frozen=True)
class Work:
    """The work that all contenders do alike. prompts: JSON lines with the columns that rewards read, and of
    others with the columns of `heldout`, which are looked at and never learned from."""

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
    temperature: float = 1.0
    rewards: tuple[str, ...] = REWARDS
    heldout: str = ""
    seed: int = 0


class Turns:
    """Waits for a word before each step, and reports after it."""

    def __init__(self, out: Any) -> None:
        self._out, self._start, self._peak = out, 0.0, 0
        self.look: Callable[[], Mapping[str, float]] = dict

    def say(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self._out, flush=True)

    def wait(self) -> None:
        while (word := sys.stdin.readline().strip()) == "look":
            self.say(dict(self.look()))
        if not word:
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


def read(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def looking(work: Work, model: Any, tokenizer: Any) -> Callable[[], dict[str, float]]:
    """Greedy answers to the held-out prompts, by our decoder: the share that is right, and that ends."""
    from grpo.config.groups import SamplingSettings
    from grpo.data import load_prompts
    from grpo.data.maker import PromptBudget
    from grpo.data.reward_functions import RewardFunctions
    from grpo.model.target import compute_dtype
    from grpo.model.weights import RolloutModel
    from grpo.rollout.sample import rollout
    from grpo.rollout.tokens import step_uniforms

    room = PromptBudget(tokenizer, model.config.max_position_embeddings, LOOK_TOKENS)
    rows = read(work.heldout)
    prompts = load_prompts(rows, seed=0, heldout_share=0.0, room=room).draw(len(rows))
    settings = SamplingSettings(max_new_tokens=LOOK_TOKENS, temperature=0.0)
    score = RewardFunctions(("gym",))  # whatever is learned
    sampler = RolloutModel(model, compute_dtype("auto", model.device))

    def look() -> dict[str, float]:
        sampler.refresh()
        uniforms = step_uniforms(len(prompts), LOOK_TOKENS, seed=0, step=-1)
        written = rollout(sampler.model, tokenizer, prompts, uniforms, settings, rows=work.batch_size)
        right = (score(written).rewards > 0.99).double()
        return {
            "right": right.mean().item(),
            "ended": written.terminated.double().mean().item(),
            "tokens": written.lengths.double().mean().item(),
            "short": (right * (written.lengths <= work.max_new_tokens)).mean().item(),
            "each": right.tolist(),
            "texts": written.texts[:3],
        }

    return look


def run_ours(work: Work, turns: Turns) -> None:
    """Our trainer as train_lean.py runs it, less evaluation and checkpoints."""
    from grpo.config import Config
    from grpo.memory.budget import GB
    from grpo.trainer import Trainer

    config = Config(
        steps=work.steps,
        batch_size=work.batch_size,
        group_size=work.group_size,
        model=work.model,
        device=work.device,
        heldout_share=0.0,
        engine="off",
        reward=work.rewards,
        max_new_tokens=work.max_new_tokens,
        temperature=work.temperature,
        kl_coef=work.kl_coef,
        learning_rate=work.learning_rate,
        train_rows=work.train_rows,
        score_rows=work.train_rows,
        eval_interval=0,
        checkpoint_interval=0,
        runs_dir=Path(work.folder),
        name="ours",
        trackers=(),
        seed=work.seed,
    )
    rows = read(work.prompts)
    if "fen" in rows[0]:  # of positions our own source makes the prompts, which are the same
        rows = [{k: v for k, v in row.items() if k != "prompt" and v is not None} for row in rows]
    trainer = Trainer(config, prompts=rows)
    if work.heldout:
        turns.look = looking(work, trainer.run.policy.model, trainer.run.policy.tokenizer)
    turns.say({"ready": True})
    turns.wait()
    for step in trainer:
        split = {name: value for name, value in step.metrics.items() if name.startswith("timing/")}
        # The trainer resets peaks at each phase, those of the system too.
        turns.report(step.metrics["completions/mean_length"], split, GB * step.metrics["memory/peak_gb"])
        turns.wait()


def run_trl(work: Work, turns: Turns, *, best: bool, options: Mapping[str, Any] | None = None) -> None:
    """TRL's GRPOTrainer, or with options ours of that name: in its best configuration, or as it comes.

    Best is bf16 where the machine multiplies in it, as ours does, the fused GELU, and no dropout.
    """
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from grpo.data.reward_files import load_reward
    from grpo.model.target import compute_dtype

    changes: dict[str, Any] = {"activation_function": "gelu_pytorch_tanh" if best else "gelu_new"}
    changes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0 if best else 0.1)
    settings: dict[str, Any] = {"bf16": False}
    if best:
        lower = compute_dtype("auto", torch.device(work.device)) == torch.bfloat16
        settings = {"bf16": lower, "gradient_checkpointing": False}
    config = AutoConfig.from_pretrained(work.model)
    if config.model_type == "gpt2":
        config.update(changes)

    kind = trl.GRPOTrainer if options is None else import_module("grpo.trl").GRPOTrainer

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.wait()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **__: Any) -> None:
            if "completions/mean_length" in logs:  # of a step, and not of the end
                turns.report(logs["completions/mean_length"], {})

    model = AutoModelForCausalLM.from_pretrained(work.model, config=config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    trainer = kind(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[load_reward(name)[1] for name in work.rewards],
        train_dataset=Dataset.from_list(read(work.prompts)),
        args=trl.GRPOConfig(
            output_dir=f"{work.folder}/trl",
            per_device_train_batch_size=work.train_rows,
            gradient_accumulation_steps=work.batch_size // work.train_rows,
            num_generations=work.group_size,
            max_completion_length=work.max_new_tokens,
            temperature=work.temperature,
            max_steps=work.steps,
            beta=work.kl_coef,
            learning_rate=work.learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=work.device == "cpu",
            disable_tqdm=True,
            seed=work.seed,
            lr_scheduler_type="constant",
            **settings,
        ),
        callbacks=[Steps()],
        **(options or {}),
    )
    if work.heldout:
        turns.look = looking(work, model, tokenizer)
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
        elif work.name.startswith("drop-in"):
            run_trl(work, turns, best=True, options={"skip_zero_variance": work.name != "drop-in"})
        else:
            run_trl(work, turns, best=work.name == "trl")


if __name__ == "__main__":
    main()
