"""TRL's GRPO trainer, where memory says how many rows are on the device at once.

A step sees the completions that TRL's settings say. They are sampled, scored and learned from in parts that
fit (`grpo.memory.Fit`): measured, planned, and after running out of memory done again with fewer rows, to
the same gradient. TRL's code does all of it: its methods are called once a part, and what they give is
weighted so that it does not depend on the parts.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import transformers
import trl
from accelerate.utils import DistributedType
from loguru import logger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from grpo.config.sizes import parse_size
from grpo.environment import keep_freed
from grpo.errors import UserError
from grpo.memory import Device, Fit, PassSize
from grpo.memory.budget import data_limit
from grpo.model.load import is_cut_short, rotary_limit
from grpo.plan.tables import Measured
from grpo.trl.parts import (
    LOSSES,
    Part,
    completion_lengths,
    fields_by_row,
    merged,
    parts,
    rows_with_advantage,
)
from grpo.trl.processes import LocalAccelerator, average_gradients, metric_values, smallest, unwrapped
from grpo.trl.record import plan_table, step_metrics
from grpo.trl.replay import RandomState, drop_gradients, gradients_apart
from grpo.trl.sampling import NativeSampler, base_model, longest_completion, say_trl_samples, why_not_native
from grpo.trl.shared_prompts import has_dropout, may_share_prompts, shared_prompts, unlike_prompts

SHARDED = DistributedType.DEEPSPEED, DistributedType.FSDP
"""Kinds of sharding whose processes make the same passes, and cannot do one again by themselves."""
CONTINUOUS_BATCHING = "use_transformers_continuous_batching", "use_transformers_paged"
"""TRL's switches for transformers' engine; the latter is the older name."""


class _StepInParts(transformers.Trainer):
    """Between TRL's class and transformers': a step of the former is a step of the latter for each part."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        if hasattr(self.optimizer, "train"):  # one that evaluates with other weights than it trains
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        step = super().training_step
        ends = self.accelerator.sync_gradients
        if self.is_sharded:

            def learn(part: Part) -> Tensor:
                ends_step = ends and part.is_last  # when DeepSpeed steps
                self.accelerator.gradient_state._set_sync_gradients(ends_step)
                return step(model, part, num_items_in_batch)

            return self._in_parts("learn", inputs, learn)

        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        begin = RandomState(self.accelerator.device)
        entropy_so_far = getattr(self, "_entropy_window_stats", None)

        def rollback() -> None:
            drop_gradients(parameters)
            begin.restore()
            self._entropy_window_stats = entropy_so_far

        with gradients_apart(parameters):
            loss = self._in_parts(
                "learn", inputs, lambda part: step(unwrapped(model), part, num_items_in_batch), rollback
            )
        if ends and self.accelerator.num_processes > 1:
            average_gradients(parameters)
        return loss


class GRPOTrainer(trl.GRPOTrainer, _StepInParts):
    """`trl.GRPOTrainer`, and its batch fits.

    memory_utilization: share of the device that may be held. memory_limit: the most, such as "20GB", which
    is planned for and not enforced. native_sampling: whether completions are sampled by the decoder of this
    project where it gives the same distribution as TRL's `generate`. share_prompts: whether scoring and
    learning compute a group's prompt once, where that gives the states of the model's own forward pass.
    skip_zero_variance: leave rows out of learning whose advantage is 0, as those of groups with equal
    rewards: the gradient is the same, metrics such as the entropy are of the other rows. All other arguments
    are TRL's.

    ValueError for settings that a batch in parts cannot have; `DoesNotFit` when one row is too much.
    """

    accelerator: Any
    entropy_coef: float

    def __init__(
        self,
        *args: Any,
        memory_utilization: float = 0.85,
        memory_limit: str | int | None = None,
        native_sampling: bool = True,
        share_prompts: bool = True,
        skip_zero_variance: bool = False,
        **kwargs: Any,
    ) -> None:
        if not 0 < memory_utilization <= 1:
            raise UserError(f"memory_utilization={memory_utilization}: a share of the device, up to 1.")
        limit = parse_size(memory_limit) if isinstance(memory_limit, str) else memory_limit
        arguments = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        _refuse(arguments.get("args"), skips=skip_zero_variance)
        super().__init__(*args, **kwargs)
        if getattr(self, "aux_loss_enabled", False):
            raise UserError(
                "the router's auxiliary loss is a product of means over all tokens on the device, so it "
                "depends on how a batch is split: set GRPOConfig(router_aux_loss_coef=0.0)."
            )
        device = self.accelerator.device
        if device.type == "cpu" and data_limit() is None:
            keep_freed()  # fresh pages would cost more than what is done with them
        self.is_sharded = self.accelerator.distributed_type in SHARDED
        self.fit = Fit(
            Device(
                device,
                utilization=memory_utilization,
                limit_bytes=limit,
                counts_by_driver=device.type == "cuda" and self._engine_sleeps,
            ),
            group_size=self.num_generations,
            replays=not self.is_sharded,
            sync_rows=(lambda rows: smallest(rows, device)) if self.is_sharded else (lambda rows: rows),
        )
        if skip_zero_variance and self.is_sharded:
            raise UserError(
                "skip_zero_variance leaves rows out, and processes that share a model take as many passes: "
                "leave it out."
            )
        self._skips = skip_zero_variance
        self._measured, self._num_steps = Measured(), 0
        self._shares = share_prompts and may_share_prompts(self)
        self._sampler = None
        reason = None if native_sampling else "native_sampling is False"
        if native_sampling and (self.engine_casts or not self._has_engine):
            reason = why_not_native(self)
        if self.engine_casts:
            self._replace_engine(reason)
        if native_sampling and not self._has_engine:
            if reason is None:
                self._sampler = NativeSampler(self, self.fit)
            else:
                say_trl_samples(reason)
        if is_cut_short(self.model.config):
            logger.warning(
                "a text of more than {:,} tokens changes the rotary frequencies of all that are on the "
                "device with it, so that a step depends on how many there are: keep texts shorter",
                rotary_limit(self.model.config),
            )
        if has_dropout(self.model):
            logger.warning(
                "the model has dropout, which differs with the rows that are done at once: for steps that do "
                "not depend on them set GRPOConfig(disable_dropout=True)"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        self._show(self._measured.table(self.fit.device.budget(), title="Memory, most of all steps"))
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._num_steps == self.current_gradient_accumulation_steps:
            self._show(plan_table(self.fit))
        loss = super().training_step(*args, **kwargs)
        passes = self.fit.take_passes()
        self._num_steps += 1
        self._measured.note(passes)
        for name, value in step_metrics(passes).items():
            self._metrics["train"][name].append(value)
        return loss

    def _show(self, table: Table) -> None:
        if self.accelerator.is_main_process:
            Console().print("\n", table, sep="")  # below what may stand there, such as a progress bar

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], Any]:
        """Whole groups at a time; a part that ran out of memory begins again from the same random state."""
        sampler = self._sampler if images is None and not multimodal_fields else None
        if sampler is not None and sampler.takes(prompt_ids):
            return sampler.sample(prompt_ids), None
        generate = super()._generate_single_turn
        fields = fields_by_row(multimodal_fields, images, len(prompt_ids))
        if fields is None or self._has_engine:
            return generate(prompt_ids, images, multimodal_fields, *args, **kwargs)
        done: list[list[int]] = []
        longest = max(map(len, prompt_ids))

        def sample(rows: int) -> list[list[int]]:
            part = slice(len(done), len(done) + rows)
            of_part = images and images[part]
            return generate(prompt_ids[part], of_part, fields(part), *args, **kwargs)[0]

        while len(done) < len(prompt_ids):
            done += self.fit.run(
                "sample",
                sample,
                PassSize(len(prompt_ids) - len(done), longest + longest_completion(self)),
                took=lambda rows, ids: PassSize(rows, longest + max(map(len, ids))),
                rollback=RandomState(self.accelerator.device).restore,
            )
        return done, None

    @property
    def _has_engine(self) -> bool:
        """Whether vLLM or transformers' continuous batching samples, which mind memory themselves."""
        return any(getattr(self, engine, False) for engine in ("use_vllm", *CONTINUOUS_BATCHING))

    @property
    def _engine_sleeps(self) -> bool:
        """Whether vLLM is in this process, and gives its memory back between samplings."""
        is_here = getattr(self, "use_vllm", False) and getattr(self.args, "vllm_mode", "") == "colocate"
        return bool(is_here and getattr(self.args, "vllm_enable_sleep_mode", False))

    @property
    def engine_casts(self) -> bool:
        """Whether TRL's continuous batching would cast the weights that are trained, and leave them so."""
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        if dtype is None or not any(getattr(self, flag, False) for flag in CONTINUOUS_BATCHING):
            return False
        return any(p.is_floating_point() and p.dtype != dtype for p in self.model.parameters())

    def _replace_engine(self, reason: str | None) -> None:
        """Have the native decoder sample instead of continuous batching that casts the trained weights.

        TRL 1.16 casts them in place at every sampling (`_generate_single_turn`) and never back; steps of a
        small learning rate then round to nothing. reason: why the decoder cannot; ValueError if there is one.
        """
        flag = next(flag for flag in CONTINUOUS_BATCHING if getattr(self, flag, False))
        harm = (
            f"{flag} would cast the fp32 weights that are trained to {'bf16' if self.args.bf16 else 'fp16'}"
        )
        if reason is not None:
            raise UserError(
                f"{harm} and leave them so, in which small updates round to nothing, and the native decoder "
                f"cannot sample instead ({reason}): set {flag}=False, or bf16=False and fp16=False."
            )
        setattr(self, flag, False)
        logger.info("completions are sampled by the native decoder: {}, for good", harm)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """With a `batch_size` nothing is learned: then it is as many rows as fit."""

        def work(rows: int | None) -> Any:
            texts = input_ids, attention_mask, logits_to_keep
            return self.scored(model, *texts, rows, *args, **kwargs)

        if batch_size is None:
            return work(None)
        return self.fit.run("score", work, self._size(len(input_ids), logits_to_keep, input_ids.size(1)))

    def scored(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """TRL's log-probs of the last `tokens` of each text, so many rows at once as it is told."""
        texts = input_ids, attention_mask
        with ExitStack() as stack:
            if self._shares:
                texts = stack.enter_context(shared_prompts(base_model(unwrapped(model)), *texts, tokens))
            return super()._get_per_token_logps_and_entropies(model, *texts, tokens, *args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, Part):
            return generation_batch
        return super()._prepare_inputs(generation_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns a part's share of its batch's loss; in an evaluation a batch's loss, in parts."""
        if not isinstance(inputs, Part):
            if return_outputs or torch.is_grad_enabled():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return self._in_parts("evaluate", inputs, lambda part: self.compute_loss(unwrapped(model), part))
        mode, weight = self._mode, inputs.weight(self.loss_type)
        before = self.accelerator, self._metrics[mode], self.entropy_coef
        self.accelerator, self._metrics[mode] = LocalAccelerator(self.accelerator), inputs.metrics
        if weight:  # the entropy's bonus is a mean over tokens, whatever the loss is
            self.entropy_coef *= inputs.token_share / weight
        try:
            return weight * super().compute_loss(model, inputs)
        finally:
            self.accelerator, self._metrics[mode], self.entropy_coef = before

    def _in_parts(
        self,
        phase: str,
        inputs: Mapping[str, Any],
        one_part: Callable[[Part], Tensor],
        rollback: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """The batch's loss and metrics, from those of parts that fit."""
        only = rows_with_advantage(inputs) if self._skips and phase == "learn" else None
        groups = None
        if self._shares and (unlike := unlike_prompts(inputs["prompt_ids"], inputs["prompt_mask"])):
            groups = unlike[1].tolist()
        multiple = getattr(self, "pad_to_multiple_of", None) or 1

        def work(rows: int) -> list[Part]:
            done = []
            for part in parts(inputs, rows, multiple=multiple, only=only, groups=groups):
                part.loss = one_part(part)
                part.clear()  # of tensors
                done.append(part)
            return done

        tokens = int(completion_lengths(inputs).max())
        size = self._size(
            len(inputs["prompt_ids"] if only is None else only), tokens, inputs["prompt_ids"].size(1) + tokens
        )
        done = self.fit.run(phase, work, size, rollback=rollback)
        by_sequence = self.importance_sampling_level == "sequence"
        metrics = merged(done, loss_type=self.loss_type, by_sequence=by_sequence)
        for name, value in metric_values(metrics, self.accelerator).items():
            self._metrics[self._mode][name].append(value)
        if self._mode == "train" and self.accelerator.sync_gradients and self._entropy_bonus_enabled:
            self._control_entropy()
        return torch.stack([part.loss for part in done]).sum()

    def _size(self, rows: int, tokens: int, width: int) -> PassSize:
        """Returns the size of a pass over rows of so many completion tokens, and of `width` with the
        prompt."""
        return PassSize(rows, tokens, width - tokens) if self._shares else PassSize(rows, width)

    def _control_entropy(self) -> None:
        """The end of a step to TRL's control of the entropy, which its parts are not."""
        if self.use_adaptive_entropy:
            total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum")
            self._last_world_entropy = (total / count.clamp(min=1.0)).item()
            self._entropy_window_stats = None
            too_low = self._last_world_entropy <= self.args.entropy_target
            coefficient = self.entropy_coef + (1 if too_low else -1) * self.args.entropy_coef_delta
            self.entropy_coef = min(max(coefficient, self.args.entropy_coef_min), self.args.entropy_coef_max)
        self._metrics["train"]["entropy_coef"].append(self.entropy_coef)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"


def _refuse(settings: Any, *, skips: bool) -> None:
    """ValueError for what cannot be had of a batch in parts, before a model is loaded.

    skips: whether rows without an advantage are left out, from which a KL or a bonus would learn.
    """
    if settings is None:
        return
    has_bonus = getattr(settings, "entropy_coef", 0.0) or getattr(settings, "use_adaptive_entropy", False)
    if skips and (settings.beta or has_bonus):
        reason = f"beta is {settings.beta}" if settings.beta else "there is a bonus on entropy"
        raise UserError(
            f"skip_zero_variance leaves rows out that would be learned from: {reason}. Set one or the other."
        )
    if settings.top_entropy_quantile < 1.0:
        raise UserError(
            f"top_entropy_quantile={settings.top_entropy_quantile} is a quantile over the rows on the device "
            "at once: set it to 1.0, or use entropy_coef to keep entropy up."
        )
    if settings.loss_type not in LOSSES:
        raise UserError(
            f"how the loss {settings.loss_type!r} adds up over parts is not known: set loss_type to one of "
            f"{', '.join(LOSSES)}."
        )
    if settings.use_liger_kernel and hasattr(GRPOTrainer, "compute_liger_loss"):
        raise UserError(
            "Liger's fused loss divides by the rows that are on the device at once: set "
            "use_liger_kernel=False, or install TRL 1.15 or newer, which takes only its layers."
        )
