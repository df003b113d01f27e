"""The phases of a trainer of TRL's on tensors without storage: TRL's own code, and our sampling."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import transformers
import trl.trainer.grpo_trainer as theirs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from trl.trainer.utils import use_adapter

from grpo.memory import PassSize
from grpo.model.weights import RolloutModel
from grpo.plan.phase_probe import PhaseProbe
from grpo.plan.trace import Mode, TracedPhases, take_norms_as_cuda_does
from grpo.plan.workload import Workload
from grpo.scoring.stream import Texts
from grpo.trl import shared_prompts
from grpo.trl.parts import Part
from grpo.trl.sampling import base_model


@dataclass(frozen=True)
class TrainerWork(Workload):
    """Everything that the memory of a trainer's phases depends on."""

    done: tuple[str, ...] = ()
    """Its phases that can be traced."""
    learn_rows: int = 0
    """A batch of learning; a batch of sampling may be several."""
    shares_prompts: bool = True
    """Whether scoring and learning compute a group's prompt once."""

    @property
    def phases(self) -> tuple[str, ...]:
        return self.done

    @property
    def fixed_rows(self) -> dict[str, int]:
        return {"learn": self.learn_rows}


class TracedTrainer(TracedPhases):
    """A trainer on a model without storage."""

    work: TrainerWork

    def __init__(self, work: TrainerWork, trainer: Any, mode: Mode) -> None:
        self.work, self._mode, self._known = work, mode, {}
        for model in filter(None, (trainer.model, trainer.ref_model)):
            _without_storage(model, mode)
            if work.target.device.type == "cuda":
                take_norms_as_cuda_does(model)
        with mode:
            self.phases = TrainerPhases(work, trainer, hold_recording=self._hold_recording)

    def _trace(self, phase: str, size: PassSize) -> int:
        group = self.work.config.group_size

        def groups(rows: Tensor) -> tuple[Tensor, Tensor]:
            return rows[::group], torch.arange(len(rows), device=rows.device) // group

        # Prompts without values are told apart by their places, and texts are as long as there is room for.
        with (
            _kernels_of(self.work.target.device),
            mock.patch.object(shared_prompts, "_unique", groups),
            mock.patch.object(shared_prompts, "_read", _longest_texts),
        ):
            return super()._trace(phase, size)

    def _unseen(self, phase: str, size: PassSize) -> int:
        if phase == "learn" and not self.work.shares_prompts:
            size = PassSize(size.rows, size.prompt_tokens + size.completion_tokens)
        return super()._unseen(phase, size)


def _longest_texts(unlike: Tensor, row_to_prompt: Tensor, ids: Tensor, mask: Tensor) -> Texts:
    """Makes up what `shared_prompts._read` gives: rows of one prompt are side by side."""
    (num_prompts, prompt_tokens), (num_rows, tokens) = unlike.shape, ids.shape
    prompt_of = [row * num_prompts // num_rows for row in range(num_rows)]
    return Texts([[0] * prompt_tokens] * num_prompts, prompt_of, [[0] * tokens] * num_rows)


class TrainerPhases(PhaseProbe):
    """The phases of a trainer: sampling is ours, and the others run TRL's code."""

    def __init__(self, work: TrainerWork, trainer: Any, **options: Any) -> None:
        self._trainer, self._model = trainer, trainer.model
        policy = base_model(trainer.model)
        sampler = RolloutModel(policy, torch.bfloat16 if trainer.args.bf16 else policy.dtype).model
        super().__init__(work, trainer.model, sampler, **options)
        self._learn_rows = work.learn_rows

    def resident(self) -> dict[str, int]:
        trainer, trained = self._trainer, sum(parameter.nbytes for parameter in self.trained)
        parts = {"weights": _num_bytes(self._model), "optimizer": self._moment_bytes()}
        if trainer.ref_model is not None:
            parts["reference"] = _num_bytes(trainer.ref_model)
        there = {*map(id, self._model.parameters())}
        if copies := sum(copy.nbytes for copy in self._sampler.parameters() if id(copy) not in there):
            parts["sampler's copy"] = copies
        if trainer.args.gradient_accumulation_steps > 1:
            parts["gradients of other batches"] = trained
        return parts

    def _moment_bytes(self) -> int:
        """Returns the bytes of moments; an unknown optimizer is taken to have as many as AdamW."""
        name = str(self._trainer.args.optim.value)
        if name == "sgd":
            return 0
        sizes = (tensor.numel() * (1 if "8bit" in name else tensor.itemsize) for tensor in self.trained)
        return 2 * sum(sizes)

    def known_parts(self, phase: str, size: PassSize) -> dict[str, int]:
        if phase == "sample":
            return super().known_parts(phase, size)
        return {"gradients": sum(parameter.nbytes for parameter in self.trained)} if phase == "learn" else {}

    @torch.no_grad()
    def sample(self, size: PassSize) -> None:
        was_training = self.policy.training
        self.policy.eval()
        super().sample(size)
        self.policy.train(was_training)

    @torch.no_grad()
    def score(self, size: PassSize) -> None:
        trainer, inputs = self._trainer, self._inputs(size)
        ids, mask = (
            torch.cat([inputs[f"{part}_{name}"] for part in ("prompt", "completion")], 1)
            for name in ("ids", "mask")
        )
        score = partial(trainer.scored, batch_size=size.rows)
        with _WithoutValues(size):
            if scores_policy(trainer):
                score(trainer.model, ids, mask, size.completion_tokens)
            if trainer.ref_model is not None:
                score(trainer.ref_model, ids, mask, size.completion_tokens)
            elif trainer.beta:
                adapter = "ref" if "ref" in trainer.model.peft_config else None
                with use_adapter(trainer.model, adapter):
                    score(trainer.model, ids, mask, size.completion_tokens)

    def learn(self, size: PassSize) -> None:
        if size.rows < self._learn_rows:
            self.begin_gradients()
        tokens = size.rows * size.completion_tokens
        part = Part(self._inputs(size), rows=size.rows, tokens=tokens, of_rows=size.rows, of_tokens=tokens)
        with _WithoutValues(size):
            transformers.Trainer.training_step(self._trainer, self._model, part)
        self.drop_gradients()

    def _inputs(self, size: PassSize) -> dict[str, Tensor]:
        prompts, completions = (size.rows, size.prompt_tokens), (size.rows, size.completion_tokens)
        inputs = {
            "prompt_ids": torch.zeros(prompts, dtype=torch.long),  # which of them are the same is made up
            "prompt_mask": torch.ones(prompts, dtype=torch.long),
            "completion_ids": torch.zeros(completions, dtype=torch.long),
            "completion_mask": torch.ones(completions, dtype=torch.long),
            "advantages": torch.zeros(size.rows),
            "num_items_in_batch": torch.tensor(1.0),
        }
        if scores_policy(self._trainer):
            inputs["old_per_token_logps"] = torch.zeros(completions)
        if self._trainer.beta:
            inputs["ref_per_token_logps"] = torch.zeros(completions)
        return inputs


class _WithoutValues(TorchFunctionMode):
    """Tensors without storage have no values: numbers read of them, for metrics, are made up."""

    def __init__(self, size: PassSize) -> None:
        super().__init__()
        self._size = size

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__):
            return {Tensor.item: 1.0, Tensor.__float__: 1.0, Tensor.__int__: 1, Tensor.__bool__: False}[func]
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            values, mask = args  # a mask of texts chooses the completions' tokens
            chosen = self._size.rows * self._size.completion_tokens if mask.ndim == 2 else mask.numel()
            return values.flatten(0, mask.ndim - 1)[:chosen].clone()
        return func(*args, **(kwargs or {}))


@contextmanager
def _kernels_of(device: torch.device) -> Iterator[None]:
    """Inside, TRL's fused head takes what it takes there: on CUDA its kernels fold tiles of logits in place.

    They score completions only, where all else scores prompts, too. TRL before 1.15 has no such head.
    """
    with ExitStack() as changed:
        if device.type == "cuda" and hasattr(theirs, "add_fused_lm_head"):
            kernels = import_module("trl.kernels.chunked_logprob")
            for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
                changed.enter_context(mock.patch.object(kernels, name, lambda *_, **__: None))
            changed.enter_context(mock.patch("trl.trainer.utils._use_triton", lambda _: True))
        yield


def _without_storage(model: nn.Module, mode: FakeTensorMode) -> None:
    """Adapters, which peft has made for real, lose theirs, too."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, FakeTensor):
                fake = mode.from_tensor(parameter.detach(), static_shapes=True)
                setattr(module, name, nn.Parameter(fake, parameter.requires_grad))


def scores_policy(trainer: Any) -> bool:
    """Whether completions may be older than the policy, which TRL then scores first."""
    args = trainer.args
    return bool(args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations))


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
