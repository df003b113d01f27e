"""Stock TRL and ours over the same completions, in float64, for tests and the whole grid in tests/proof.

TRL's fused head sums in fp32 whatever the model is; here both get a plain one, so that what is left is
float64's rounding.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import trl
import trl.trainer.grpo_trainer as stock
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from grpo.trl import GRPOTrainer
from grpo.trl.parts import LOSSES

GROUP, GROUPS, LENGTH, STEPS = 4, 6, 7, 4
IN_FP32 = "clip_ratio/", "cispo_clip_ratio"
"""Metrics that TRL computes in fp32 itself."""
NOT_COMPARED = "memory/", "step_time", "train_runtime", "per_second", "total_flos"


@dataclass(frozen=True)
class Case:
    """Settings that a run is made with."""

    loss: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    accumulation: int = 1
    iterations: int = 1
    more: tuple[tuple[str, Any], ...] = ()
    """More settings of GRPOConfig."""


def all_cases() -> list[Case]:
    return [
        Case(*each) for each in itertools.product(LOSSES, ("token", "sequence"), (0.0, 0.04), (1, 2), (1, 2))
    ]


class Given:
    """Completions that are made up: the same for whoever asks at the same step."""

    def _generate_single_turn(
        self, prompt_ids: Any, *rest: Any, **named: Any
    ) -> tuple[list[list[int]], None]:
        rank, rows = self.accelerator.process_index, len(prompt_ids)
        everyones = rows * self.accelerator.num_processes
        draws = torch.Generator().manual_seed(self.state.global_step)
        lengths = torch.randint(1, LENGTH + 1, (everyones,), generator=draws).tolist()
        tokens = torch.randint(1, 8, (everyones, LENGTH), generator=draws).tolist()
        ends = torch.rand(everyones, generator=draws).tolist()
        made = [
            [*own[: length - 1], 0] if end < 0.7 else own
            for own, length, end in zip(tokens, lengths, ends, strict=True)
        ]
        return made[rank * rows : (rank + 1) * rows], None


class Stock(Given, trl.GRPOTrainer):
    pass


class Ours(Given, GRPOTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<eos>": 0, **{letter: i for i, letter in enumerate("abcdefg", start=1)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="a")), eos_token="<eos>", pad_token="<eos>"
    )


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    made = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=8,
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).double()
    with torch.no_grad():  # a fresh GPT-2 is close to uniform, which would hide mistakes
        made.transformer.wte.weight.normal_(std=0.7)
    return made


def plain_head(policy: Any, temperature: float = 1.0, **_: Any) -> None:
    """Returns TRL's `add_fused_lm_head`, in the model's own dtype."""
    forward = policy.forward

    def with_log_probs(
        *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **named: Any
    ) -> Any:
        if not fused_lm_head:
            return forward(*args, **named)
        logp = (forward(*args, use_cache=False, **named).logits[:, :-1] / temperature).log_softmax(-1)
        chosen = logp.gather(-1, labels[:, 1:].clamp(min=0)[..., None]).squeeze(-1)
        return SimpleNamespace(log_probs=chosen, entropy=-(logp.exp() * logp).sum(-1), aux_loss=None)

    policy.forward = with_log_probs


@contextmanager
def exactly() -> Iterator[None]:
    """Inside, trainers are made with the plain head. Of TRL before 1.15 all is plain."""
    if not hasattr(stock, "add_fused_lm_head"):
        yield
        return
    fused, stock.add_fused_lm_head = stock.add_fused_lm_head, plain_head
    try:
        yield
    finally:
        stock.add_fused_lm_head = fused


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / len(ids) - 0.1 * len(ids) for ids in completion_ids]


def make(kind: type, case: Case, *, processes: int = 1, **options: Any) -> Any:
    """A trainer of this kind, with a tiny model in float64 and SGD. processes: that share the step's rows."""
    rows = GROUP * GROUPS // processes
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "optim": "sgd",
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": STEPS,
        "per_device_train_batch_size": rows // case.accumulation,
        "num_iterations": case.iterations,
        "gradient_accumulation_steps": case.accumulation,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "loss_type": case.loss,
        "importance_sampling_level": case.level,
        "beta": case.beta,
        "epsilon": 0.05,
        "epsilon_high": 1.1 if case.loss == "cispo" else 0.06,
    }
    reference: Any = model()
    loaded, stock.create_model_from_path = stock.create_model_from_path, lambda *_, **__: reference
    try:
        with exactly():
            made = kind(
                model=model(),
                reward_funcs=reward,
                processing_class=tokenizer(),
                train_dataset=Dataset.from_dict({"prompt": ["a b", "c", "d e f", "g", "a a", "b"] * 4}),
                args=trl.GRPOConfig(**settings | dict(case.more)),
                **options,
            )
    finally:
        stock.create_model_from_path = loaded
    return made


def run(
    kind: type, case: Case, *, prepare: Callable[[Any], None] = lambda trainer: None, **options: Any
) -> dict[str, Any]:
    """Train; parameters by name and what was logged at each step. options: as `make` takes them."""
    trainer = make(kind, case, **options)
    prepare(trainer)
    trainer.train()
    logged = [
        {
            name: value
            for name, value in entry.items()
            if not any(part in name for part in NOT_COMPARED) and value is not None
        }
        for entry in trainer.state.log_history[:-1]
    ]
    return {"parameters": trainer.model.state_dict(), "logged": logged}


def rows_at_once(rows: int) -> Callable[[Any], None]:
    """Let a trainer of ours take so many, whatever fits."""

    def prepare(trainer: Any) -> None:
        trainer.fit.plan = lambda phase, batch, like="": min(rows, batch.rows)

    return prepare


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Returns the largest difference of parameters, and of logged values. An AssertionError where not the
    same was logged."""
    parameters = max(
        float((value - other["parameters"][name]).abs().max()) for name, value in one["parameters"].items()
    )
    logged = 0.0
    for mine, theirs in zip(one["logged"], other["logged"], strict=True):
        assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())
        for name, value in mine.items():
            tolerance = 1e-3 if name.startswith(IN_FP32) else 1.0  # of fp32, 1e-7 is what 1e-10 is otherwise
            logged = max(logged, tolerance * abs(value - theirs[name]))
    return parameters, logged
