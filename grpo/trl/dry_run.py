"""What fits of a run of TRL's before it: TRL's own script, up to its first step, on a model without storage.

The script builds our trainer as ever, and TRL's and accelerate's code around it is the real one; only its
weights are fake. Passes of each phase are then traced, and planned by the planner of every run.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import transformers
import trl
import trl.trainer.grpo_trainer as theirs
from accelerate.state import AcceleratorState, GradientState
from loguru import logger
from rich.console import Console
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl.trainer.utils import use_adapter

from grpo.config import Config
from grpo.memory import Card, Device, DoesNotFit, Fit, Size
from grpo.memory.budget import CONTEXT_BYTES, card_memory, readable
from grpo.model.load import context_length
from grpo.model.target import make_target
from grpo.model.weights import RolloutModel
from grpo.plan.phases_at import PhasesAt
from grpo.plan.tables import plan_of, plan_table
from grpo.plan.trace import TracedPhases, take_norms_as_cuda_does
from grpo.plan.warm_up import STARTED_BYTES, see_trace, warm_up
from grpo.plan.workload import LONGEST_TEXTS, Workload
from grpo.trl.parts import Part
from grpo.trl.sampling import base_model, obstacle
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
        super().__init__(*args, native_sampling=False, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with _told():
            return super().train()  # from no checkpoint

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        raise _FirstStep(self)


@dataclass(frozen=True)
class TrainerWork(Workload):
    """What the memory of a trainer's phases depends on."""

    done: tuple[str, ...] = ()
    """Its phases that can be traced."""
    learn_rows: int = 0
    """A batch of learning; a batch of sampling may be several."""

    @property
    def phases(self) -> tuple[str, ...]:
        return self.done

    @property
    def fixed_rows(self) -> dict[str, int]:
        return {"learn": self.learn_rows}


class TrainerPhases(PhasesAt):
    """The phases of a trainer: sampling is ours, and the others run TRL's code."""

    def __init__(self, work: TrainerWork, trainer: Any, **options: Any) -> None:
        self._trainer, self._model = trainer, trainer.model
        policy = base_model(trainer.model)
        self._sampling = RolloutModel(policy, torch.bfloat16 if trainer.args.bf16 else policy.dtype)
        super().__init__(work, trainer.model, self._sampling.model, **options)
        self._learn_rows = work.learn_rows

    def resident(self) -> dict[str, int]:
        trainer, trained = self._trainer, sum(parameter.nbytes for parameter in self.trained)
        parts = {"weights": _num_bytes(self._model), "optimizer": _moments(trainer, trained)}
        if trainer.ref_model is not None:
            parts["reference"] = _num_bytes(trainer.ref_model)
        if copies := sum(copied.nbytes for copied, *_ in self._sampling._copies):
            parts["sampler's copy"] = copies
        if trainer.args.gradient_accumulation_steps > 1:
            parts["gradients of other batches"] = trained
        return parts

    def known_parts(self, phase: str, size: Size) -> dict[str, int]:
        if phase == "sample":
            return super().known_parts(phase, size)
        return {"gradients": sum(parameter.nbytes for parameter in self.trained)} if phase == "learn" else {}

    @torch.no_grad()
    def sample(self, size: Size) -> None:
        was_training = self.policy.training
        self.policy.eval()
        super().sample(size)
        self.policy.train(was_training)

    @torch.no_grad()
    def score(self, size: Size) -> None:
        trainer, inputs = self._trainer, self._inputs(size)
        ids, mask = (torch.cat([inputs[f"{part}_{name}"] for part in ("prompt", "completion")], 1)
                     for name in ("ids", "mask"))  # fmt: skip
        score = partial(trl.GRPOTrainer._get_per_token_logps_and_entropies, trainer)
        with _WithoutValues(size):
            if _scores_policy(trainer):
                score(trainer.model, ids, mask, size.tokens, size.rows)
            if trainer.ref_model is not None:
                score(trainer.ref_model, ids, mask, size.tokens, size.rows)
            elif trainer.beta:
                adapter = "ref" if "ref" in trainer.model.peft_config else None
                with use_adapter(trainer.model, adapter):
                    score(trainer.model, ids, mask, size.tokens, size.rows)

    def learn(self, size: Size) -> None:
        if size.rows < self._learn_rows:
            self.begin_gradients()
        tokens = size.rows * size.tokens
        part = Part(self._inputs(size), rows=size.rows, tokens=tokens, of_rows=size.rows, of_tokens=tokens)
        with _WithoutValues(size):
            transformers.Trainer.training_step(self._trainer, self._model, part)
        self.forget()

    def _inputs(self, size: Size) -> dict[str, Tensor]:
        prompts, completions = (size.rows, size.shared), (size.rows, size.tokens)
        inputs = {
            "prompt_ids": torch.zeros(prompts, dtype=torch.long),
            "prompt_mask": torch.ones(prompts, dtype=torch.long),
            "completion_ids": torch.zeros(completions, dtype=torch.long),
            "completion_mask": torch.ones(completions, dtype=torch.long),
            "advantages": torch.zeros(size.rows),
            "num_items_in_batch": torch.tensor(1.0),
        }
        if _scores_policy(self._trainer):
            inputs["old_per_token_logps"] = torch.zeros(completions)
        if self._trainer.beta:
            inputs["ref_per_token_logps"] = torch.zeros(completions)
        return inputs


class TracedTrainer(TracedPhases):
    """A trainer on a model without storage."""

    def __init__(self, work: TrainerWork, trainer: Any, mode: FakeTensorMode) -> None:
        self.work, self._mode, self._known = work, mode, {}
        for model in filter(None, (trainer.model, trainer.ref_model)):
            _without_storage(model, mode)
            if work.target.device.type == "cuda":
                take_norms_as_cuda_does(model)
        with mode:
            self.phases = TrainerPhases(work, trainer, hold_recording=self._hold_recording)

    def _trace(self, phase: str, size: Size) -> int:
        with _kernels_of(self.work.target.device):
            return super()._trace(phase, size)

    def _unseen(self, phase: str, size: Size) -> int:
        whole = Size(size.rows, size.shared + size.tokens)  # a prompt is each row's own
        return super()._unseen(phase, whole if phase == "learn" else size)


class _Mode(FakeTensorMode):
    """What is copied with a model stays the mode of its tensors."""

    def __deepcopy__(self, memo: object) -> "_Mode":
        return self


class _WithoutValues(TorchFunctionMode):
    """Tensors without storage have no values: numbers read of them, for metrics, are made up."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._size = size

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__):
            return {Tensor.item: 1.0, Tensor.__float__: 1.0, Tensor.__int__: 1, Tensor.__bool__: False}[func]
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            values, mask = args  # a mask of texts chooses the completions' tokens
            chosen = self._size.rows * self._size.tokens if mask.ndim == 2 else mask.numel()
            return values.flatten(0, mask.ndim - 1)[:chosen].clone()
        return func(*args, **(kwargs or {}))


def _scores_policy(trainer: Any) -> bool:
    """Whether completions may be older than the policy, which TRL then scores first."""
    args = trainer.args
    return bool(args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations))


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _moments(trainer: Any, trained_bytes: int) -> int:
    """What the optimizer holds of weights of so many bytes; of one that is not known as much as of AdamW."""
    name = str(trainer.args.optim.value)
    if name == "sgd":
        return 0
    return trained_bytes // 2 if "8bit" in name else 2 * trained_bytes


def _without_storage(model: nn.Module, mode: FakeTensorMode) -> None:
    """Adapters, which peft has made for real, lose theirs, too."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, FakeTensor):
                fake = mode.from_tensor(parameter.detach(), static_shapes=True)
                setattr(module, name, nn.Parameter(fake, parameter.requires_grad))


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which `to` and `float` are made of, for tensors without storage: one by one."""
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        if (changed := change(tensor.data)).dtype != tensor.dtype:
            tensor.data = changed
    return module


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


def _outline(
    mode: FakeTensorMode, path: str, architecture: Any = None, *, dtype: Any = "float32",
    attn_implementation: Any = None, **options: Any,
) -> PreTrainedModel:  # fmt: skip
    """What TRL's `create_model_from_path` gives, without storage."""
    if options.get("quantization_config") is not None:
        raise Untraceable("this model cannot be traced (it is quantized)")
    known = {name: options[name] for name in ("revision", "trust_remote_code") if options.get(name)}
    config = AutoConfig.from_pretrained(path, **known)
    kind = config.dtype if dtype in ("auto", None) else dtype
    kind = getattr(torch, kind) if isinstance(kind, str) else kind or torch.float32
    with _told(), mode:
        return AutoModelForCausalLM.from_config(
            config, dtype=kind, attn_implementation=attn_implementation,
            trust_remote_code=bool(options.get("trust_remote_code")),
        ).eval()  # fmt: skip


@contextmanager
def _told(*but: type[Exception]) -> Iterator[None]:
    """Inside, errors are about a model that cannot be traced; `but` these are about what a user can mend."""
    try:
        yield
    except (Untraceable, *but):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        logger.debug("{}: {}", type(error).__name__, error)
        raise Untraceable(f"this model cannot be traced ({reason})") from error


def _at_first_step(
    script: Callable[..., None], settings: tuple[Any, ...], memory: Mapping[str, Any], mode: FakeTensorMode
) -> Any:
    """The trainer of a script that comes to its first step, on this host, and leaves nothing behind."""
    args = settings[1]
    for engine in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, engine, False):
            raise Untraceable(f"{engine} samples with memory of its own")
    if settings[0].reward_model_name_or_path:
        raise Untraceable("a reward model is beside the policy")
    if args.device.type != "cpu":  # fake tensors say they are the host's
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        args.use_cpu = True
        vars(args).pop("_setup_devices", None)
    args.report_to, args.disable_tqdm = [], True
    args.push_to_hub = args.log_completions = args.eval_on_start = False

    def make(*given: Any, **named: Any) -> _Planned:
        with _told(ValueError, TypeError, OSError, ImportError):
            return _Planned(*given, **named, **memory)

    with ExitStack() as changed:
        args.output_dir = changed.enter_context(tempfile.TemporaryDirectory())
        changed.enter_context(mock.patch.object(trl, "GRPOTrainer", make))
        changed.enter_context(mock.patch.object(theirs, "create_model_from_path", partial(_outline, mode)))
        changed.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        try:
            script(*settings)
        except _FirstStep as reached:
            return reached.trainer
    raise Untraceable("TRL's script has ended without a step")


def _work_of(trainer: Any, device: torch.device) -> TrainerWork:
    """Settings as the planner knows them, and the longest prompt."""
    args, group = trainer.args, trainer.num_generations
    policy = base_model(trainer.model)
    if trainer.is_sharded:
        raise Untraceable("the model is sharded over processes")
    longest = _longest_prompt(trainer)
    reason = obstacle(trainer, try_it=False)
    if reason is None and longest + trainer.max_completion_length > context_length(policy.config):
        reason = f"the context does not hold {longest} + {trainer.max_completion_length} tokens"
    if reason is not None:
        logger.info("TRL samples by itself ({}): the first step will tell in how many rows", reason)
    scores = bool(trainer.beta) or _scores_policy(trainer)
    done = {"sample": reason is None, "score": scores, "learn": True}
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else policy.dtype
    config = Config(
        batch_size=-(-args.per_device_train_batch_size * args.steps_per_generation // group) * group,
        group_size=group, max_new_tokens=trainer.max_completion_length, temperature=trainer.temperature,
        top_k=trainer.top_k or 0, top_p=1.0 if trainer.top_p is None else trainer.top_p,
    )  # fmt: skip
    return TrainerWork(
        config, make_target(policy.config, device, dtype), longest,
        done=tuple(phase for phase, is_done in done.items() if is_done),
        learn_rows=args.per_device_train_batch_size,
    )  # fmt: skip


def _longest_prompt(trainer: Any) -> int:
    """Of the dataset, as TRL makes tokens of it: among the longest texts."""
    data = trainer.train_dataset
    if not hasattr(data, "__len__"):
        raise Untraceable("the prompts are a stream, whose longest is not known")
    if trainer._is_vlm:
        raise Untraceable("this model cannot be traced (it takes images)")
    texts = nlargest(LONGEST_TEXTS, data["prompt"], key=lambda prompt: len(str(prompt)))
    return max(1, *map(len, trainer._tokenize_prompts(texts)[0]))


def _check_one_row(traced: TracedTrainer, fit: Fit) -> None:
    """DoesNotFit where a phase has no room for one row of the longest texts."""
    work, room = traced.work, fit.room_bytes() / (1 + fit.device.slack)
    for phase in work.phases:
        needed = traced.added_bytes(phase, work.size(1))
        if needed > room and traced.added_bytes(phase, work.size(work.config.group_size)) > room:
            raise DoesNotFit(
                f"{phase} does not fit: one row needs {readable(needed)} beside the "
                f"{readable(fit.device.used_bytes())} that are held all along, and there are "
                f"{fit.device.budget()}: lower max_completion_length, or set gradient_checkpointing, bf16, "
                "use_peft, or beta: 0, which need less; a smaller model needs the least."
            )


def trace(
    script: Callable[..., None], settings: tuple[Any, ...], memory: Mapping[str, Any], device: torch.device
) -> TracedTrainer:
    """What the trainer of a script would hold on `device`; see `dry_run`. Untraceable where that is unknown."""
    mode = _Mode()
    trainer = _at_first_step(script, settings, memory, mode)
    work = _work_of(trainer, device)
    with _told():
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
    here = None if device_memory else Device(device)
    card = Card(
        here.memory() if here else card_memory(device_memory or 0),
        utilization=memory["memory_utilization"], limit_bytes=memory["memory_limit"],
        slack=here.slack if here else 0,
    )  # fmt: skip
    try:
        traced = trace(script, settings, memory, device)
        work = traced.work
        with _told(DoesNotFit):
            card.held_bytes = here.used_bytes() + STARTED_BYTES if here and here.on_host else CONTEXT_BYTES
            card.held_bytes += sum(traced.phases.resident().values())
            fit = Fit(card, group_size=work.config.group_size, fixed=work.fixed_rows)
            _check_one_row(traced, fit)
            warm_up(fit, work, partial(see_trace, fit, traced), bold=True)
    except Untraceable as error:
        logger.info("{}: the first step will tell how many rows fit", error)
        return
    text = "{} rows of up to {} prompt and {} new tokens, {}"
    dtype = str(work.target.dtype).removeprefix("torch.")
    logger.info(text, work.config.num_rows, work.longest_prompt, work.config.max_new_tokens, dtype)
    console.print(plan_table(plan_of(fit, traced.phases)))
