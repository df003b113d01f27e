"""Phases on tensors without storage: what they would hold on a device that need not be there.

Nothing is computed, and what the allocator would be asked for is counted. The fake tensors say they are the
CPU's: fake CUDA tensors need a CUDA build. What kernels use within themselves is added in closed form where
it is known and large.
"""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.learning.masters import split_masters
from grpo.memory import PassSize
from grpo.memory.live import LiveBytes
from grpo.model.activation_checkpointing import recompute_activations
from grpo.model.adapters import adapters_off, add_adapters, has_adapters, linear_layers, store_base
from grpo.model.four_bits import outline
from grpo.model.weights import RolloutModel, cast_products
from grpo.plan.phase_probe import PhaseProbe
from grpo.plan.workload import Workload
from grpo.rollout.arena import Arena
from grpo.rollout.decoder import records_steps

SCRATCH_BYTES = 2 * 2**20
"""Workspace of CUDA's libraries, for models so small that it counts."""


class Mode(FakeTensorMode):
    """A mode that stays the same one when a model is copied with it."""

    def __deepcopy__(self, memo: object) -> "Mode":
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_products(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _grouped_products(left: Tensor, right: Tensor, offs: Tensor | None = None, **_: object) -> Tensor:
    """Returns an empty tensor as `torch._grouped_mm` gives it, whose own stand-in takes nothing but bf16."""
    if left.ndim == right.ndim == 2:  # summed over the tokens of each group
        assert offs is not None
        return left.new_empty(len(offs), left.shape[0], right.shape[1])
    if left.ndim == right.ndim == 3:
        return left.new_empty(len(left), left.shape[1], right.shape[2])
    return left.new_empty(left.shape[-2], right.shape[-1])


class TracedPhases:
    """A model without storage, and what a pass of each phase adds, in bytes."""

    def __init__(self, work: Workload, kind: type[PhaseProbe] = PhaseProbe) -> None:
        """kind: the phases, if others than a run's."""
        self.work = work
        self._mode, self._known = Mode(), dict[tuple[str, PassSize], int]()
        target, dtype = work.target, work.target.master_dtype
        with self._mode:
            self._policy = self._make_model(dtype)
        if work.config.uses_lora:
            self._add_adapters(dtype)
        with self._mode:
            if work.splits_masters:
                split_masters(self._policy, target.dtype, traced=True)
            sampler = RolloutModel(
                self._policy,
                dtype if work.config.shard else target.dtype,
                fp32_logits=work.config.fp32_logits,
            ).model
            if work.scores == "reference" and not work.config.uses_lora:
                self._reference = self._make_model(dtype).requires_grad_(False)
                if target.is_mixed_precision and not work.config.shard:
                    cast_products(self._reference, target.dtype)
        self.phases = kind(
            work, self._policy, sampler, self._as_reference, hold_recording=self._hold_recording
        )

    def added_bytes(self, phase: str, size: PassSize) -> int:
        """Returns the bytes that a pass adds at its peak. KeyError for an unknown phase."""
        key = phase, size
        if key not in self._known:
            self._known[key] = self._trace(phase, size) + self._unseen(phase, size)
        return self._known[key]

    def _trace(self, phase: str, size: PassSize) -> int:
        target = self.work.target
        with self._mode:
            self._live = LiveBytes(target.device.type, target.block_bytes)
            with _uninterrupted(), self._live:
                self.phases.run(phase, size)
        return self._live.peak_bytes

    def _unseen(self, phase: str, size: PassSize) -> int:
        """Returns the bytes that CUDA's kernels hold within themselves.

        Memory-efficient attention, which takes a mask, adds up the queries' gradients in fp32 where products
        are in 16 bits: blocks of 64 queries, as wide as a head, for each row and head (torch's
        mem_eff_attention/kernel_backward.h, GradQTempStorage).
        """
        target, text = self.work.target, self.work.target.model_config.get_text_config(decoder=True)
        if target.device.type != "cuda":
            return 0
        if phase != "learn" or not target.is_mixed_precision:
            return SCRATCH_BYTES
        width = max(64, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        blocks = -(-max(0, size.completion_tokens - 1) // 64)
        return SCRATCH_BYTES + size.rows * text.num_attention_heads * blocks * 4 * 64 * width

    def _hold_recording(self, arena: Arena) -> Tensor | None:
        """Decodes one token more, with what its recording holds between runs: room for all but what stays."""
        live = self._live
        held, peak = live.live_bytes, live.peak_bytes
        live.peak_bytes = held
        arena.decode_step()
        stays = live.peak_bytes - held
        live.peak_bytes = max(peak, live.peak_bytes)
        target = self.work.target
        if not records_steps(target.model_config, target.device.type):
            return None
        return torch.empty(max(0, stays), dtype=torch.uint8)

    @contextmanager
    def _as_reference(self) -> Iterator[PreTrainedModel]:
        """Yields the model that is scored: the policy as it is, without adapters, or frozen."""
        if self.work.scores == "policy":
            yield self._policy
        elif has_adapters(self._policy):
            with adapters_off(self._policy):
                yield self._policy
        else:
            yield self._reference

    def _add_adapters(self, dtype: torch.dtype) -> None:
        if self.work.config.load_in_4bit:
            outline(self._policy, linear_layers(self._policy), self._mode)
        # Not inside the mode, in which peft cannot move them: made without storage, then faked.
        add_adapters(self._policy, self.work.config, empty=True)
        with self._mode:
            for module in self._policy.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if parameter.is_meta:
                        setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
            store_base(self._policy, self.work.target.dtype)

    def _make_model(self, dtype: torch.dtype) -> PreTrainedModel:
        target = self.work.target
        model = AutoModelForCausalLM.from_config(
            target.model_config, dtype=dtype, attn_implementation=target.attention
        ).eval()
        if target.on_cpu:
            recompute_activations(model)
        if target.device.type == "cuda":
            take_norms_as_cuda_does(model)
        return model


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for a trace to end, a second: where it came in C++, torch would abort the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(*pressed[0])


def take_norms_as_cuda_does(model: PreTrainedModel) -> None:
    """CUDA's autocast takes layer norms in fp32, whatever comes in; the CPU's, which is traced, does not."""

    def exact(norm: nn.LayerNorm, values: Any) -> Tensor:
        weight: Any = norm.weight
        bias: Any = norm.bias
        if torch.is_autocast_enabled("cpu"):
            values, weight = values.float(), weight.float()
            bias = None if bias is None else bias.float()
        return F.layer_norm(values, norm.normalized_shape, weight, bias, norm.eps)

    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.forward = MethodType(exact, module)  # type: ignore[method-assign]
