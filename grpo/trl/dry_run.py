"""Plans a run of TRL's before it: TRL's own script, up to its first step, on a model without storage.

The script builds our trainer as ever, and TRL's and accelerate's code around it is the real one; only its
weights are fake. Passes of each phase are then traced, and planned by the planner of every run.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from heapq import nlargest
from typing import Any
from unittest import mock

import torch
import trl
import trl.trainer.grpo_trainer as theirs
from accelerate.state import AcceleratorState, GradientState
from loguru import logger
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo.config import Config
from grpo.config.groups import SamplingSettings
from grpo.errors import UserError
from grpo.memory import DoesNotFit, Fit
from grpo.memory.budget import readable
from grpo.model.load import context_length
from grpo.model.target import make_target
from grpo.plan.tables import plan_of
from grpo.plan.trace import Mode, TracedPhases
from grpo.plan.warm_up import card_to_plan_for, plan_by_traces, show_plan
from grpo.plan.workload import LONGEST_TEXTS
from grpo.trl.sampling import base_model, generation_of, longest_completion, why_not_native
from grpo.trl.shared_prompts import may_share_prompts
from grpo.trl.traced import TracedTrainer, TrainerWork, scores_policy
from grpo.trl.trainer import GRPOTrainer


class Untraceable(Exception):
    """Why there is no plan before the first step."""


class _FirstStep(BaseException):
    """A script has come to it, with this trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


class _Planned(GRPOTrainer):
    """Trains up to its first step, by when TRL and accelerate have made the model ready."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, native_sampling=False, share_prompts=False, **kwargs)
        self._shares = may_share_prompts(self, try_it=False)

    def _replace_engine(self, reason: str | None) -> None:
        """Leave it to `_work_of`, which asks whether the native decoder could sample instead."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        prompts = self.args.generation_batch_size // self.num_generations
        if isinstance(self.train_dataset, Sized) and len(self.train_dataset) < prompts:
            raise UserError(
                f"the dataset has {len(self.train_dataset)} prompts, and TRL leaves out a batch that is not "
                f"full, which takes {prompts}: lower per_device_train_batch_size, or give more prompts."
            )
        with as_untraceable():
            super().train()  # from no checkpoint
        raise Untraceable("TRL has trained nothing")

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        raise _FirstStep(self)


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which `to` and `float` are made of, for tensors without storage: one by one."""
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        if (changed := change(tensor.data)).dtype != tensor.dtype:
            tensor.data = changed
    return module


def _outline(
    mode: Mode,
    path: str,
    architecture: Any = None,
    *,
    dtype: Any = "float32",
    attn_implementation: Any = None,
    **options: Any,
) -> PreTrainedModel:
    """Returns the model of TRL's `create_model_from_path`, without storage."""
    if options.get("quantization_config") is not None:
        raise Untraceable("this model cannot be traced (it is quantized)")
    of_config = {name: options[name] for name in ("revision", "trust_remote_code") if options.get(name)}
    config = AutoConfig.from_pretrained(path, **of_config)
    kind = config.dtype if dtype in ("auto", None) else dtype
    kind = getattr(torch, kind) if isinstance(kind, str) else kind or torch.float32
    with as_untraceable(), mode:
        return AutoModelForCausalLM.from_config(
            config,
            dtype=kind,
            attn_implementation=attn_implementation,
            trust_remote_code=bool(options.get("trust_remote_code")),
        ).eval()


@contextmanager
def as_untraceable(*but: type[Exception]) -> Iterator[None]:
    """Inside, errors are about a model that cannot be traced; `but` these are about what a user can mend."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (Untraceable, *but)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        logger.debug("{}: {}", type(error).__name__, error)
        raise Untraceable(f"this model cannot be traced ({reason})") from error


def _at_first_step(
    script: Callable[..., None], settings: tuple[Any, ...], memory: Mapping[str, Any], mode: Mode
) -> Any:
    """The trainer of a script that comes to its first step, on this host, and leaves nothing behind."""
    args = settings[1]
    if getattr(args, "use_vllm", False):
        raise Untraceable("vLLM samples with memory of its own")
    if settings[0].reward_model_name_or_path:
        raise Untraceable("a reward model is beside the policy")
    if args.device.type != "cpu":  # fake tensors say they are the host's
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        args.use_cpu = True
        vars(args).pop("_setup_devices", None)
    args.report_to, args.disable_tqdm = [], True
    args.push_to_hub = args.log_completions = args.eval_on_start = False

    def make(*args: Any, **options: Any) -> _Planned:
        with as_untraceable(ValueError, TypeError, OSError, ImportError):
            return _Planned(*args, **options, **memory)

    with ExitStack() as changed:
        args.output_dir = changed.enter_context(tempfile.TemporaryDirectory())
        changed.enter_context(mock.patch.object(trl, "GRPOTrainer", make))
        changed.enter_context(mock.patch.object(theirs, "create_model_from_path", partial(_outline, mode)))
        changed.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        try:
            script(*settings)
        except _FirstStep as reached:
            return reached.trainer
    raise AssertionError("a script that does not train")


def _work_of(trainer: Any, device: torch.device) -> TrainerWork:
    """Settings as the planner knows them, and the longest prompt."""
    args, group = trainer.args, trainer.num_generations
    policy = base_model(trainer.model)
    if trainer.is_sharded:
        raise Untraceable("the model is sharded over processes")
    if trainer._has_engine and not trainer.engine_casts:
        raise Untraceable("continuous batching samples with memory of its own")
    longest, new_tokens = _longest_prompt(trainer), longest_completion(trainer)
    reason = why_not_native(trainer, try_it=False)
    if trainer.engine_casts:
        GRPOTrainer._replace_engine(trainer, reason)
    sampling = SamplingSettings(max_new_tokens=new_tokens)
    if reason is None:
        sampling = generation_of(trainer).settings
        sampling = replace(sampling, temperature=sampling.temperature or 1.0)  # which takes no memory
    if reason is None and longest + new_tokens > context_length(policy.config):
        reason = f"the context does not hold {longest} + {new_tokens} tokens"
    if reason is not None:
        logger.info("TRL samples by itself ({}): the first step will tell in how many rows", reason)
    scores = bool(trainer.beta) or scores_policy(trainer)
    phases = {"sample": reason is None, "score": scores, "learn": True}
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else policy.dtype
    config = Config(
        batch_size=-(-args.per_device_train_batch_size * args.steps_per_generation // group) * group,
        group_size=group,
        **vars(sampling),
    )
    return TrainerWork(
        config,
        make_target(policy.config, device, dtype),
        longest,
        done=tuple(phase for phase, is_done in phases.items() if is_done),
        learn_rows=args.per_device_train_batch_size,
        shares_prompts=trainer._shares,
    )


def _longest_prompt(trainer: Any) -> int:
    """Returns the longest prompt of the dataset in TRL's tokens, among the longest texts."""
    data = trainer.train_dataset
    if not hasattr(data, "__len__"):
        raise Untraceable("the prompts are a stream, whose longest is not known")
    if trainer._is_vlm:
        raise Untraceable("this model cannot be traced (it takes images)")
    texts = nlargest(LONGEST_TEXTS, data["prompt"], key=lambda prompt: len(str(prompt)))
    return max(1, *map(len, trainer._tokenize_prompts(texts)[0]))


def _advice(traced: TracedPhases, fit: Fit) -> DoesNotFit:
    """By the settings of TRL."""
    row = traced.work.size(1)
    phase = max(traced.work.phases, key=lambda name: traced.added_bytes(name, row))
    return DoesNotFit(
        f"{phase} does not fit: one row needs {readable(traced.added_bytes(phase, row))} beside the "
        f"{readable(fit.device.used_bytes())} that are held all along, and there are "
        f"{fit.device.budget()}: lower max_completion_length, or set gradient_checkpointing, bf16, "
        "use_peft, or beta: 0, which need less; a smaller model needs the least."
    )


def trace(
    script: Callable[..., None], settings: tuple[Any, ...], memory: Mapping[str, Any], device: torch.device
) -> TracedTrainer:
    """Returns the plan of a script's trainer on `device`, see `dry_run`. Untraceable where nobody knows."""
    mode = Mode()
    trainer = _at_first_step(script, settings, memory, mode)
    work = _work_of(trainer, device)
    with as_untraceable():
        return TracedTrainer(work, trainer, mode)


def dry_run(
    script: Callable[..., None],
    settings: tuple[Any, ...],
    memory: Mapping[str, Any],
    console: Console,
    device_memory: int | None = None,
) -> None:
    """Print the plan for the longest prompt and completions of full length; else say why there is none.

    script: TRL's, and its `settings`. memory: what our trainer takes besides. device_memory: of a card that
    is not there, as it is sold with; None: plan for the device that would train.
    ValueError for what a user can mend, DoesNotFit among it.
    """
    device = torch.device("cuda") if device_memory else settings[1].device
    try:
        traced = trace(script, settings, memory, device)
        work = traced.work
        with as_untraceable(DoesNotFit):
            card = card_to_plan_for(
                device,
                device_memory,
                utilization=memory["memory_utilization"],
                limit_bytes=memory["memory_limit"],
            )
            fit = plan_by_traces(traced, card, _advice)
    except Untraceable as error:
        logger.info("{}: the first step will tell how many rows fit", error)
        return
    show_plan(work, plan_of(fit, traced.phases), console)
