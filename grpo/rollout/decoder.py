"""The arena that a model decodes in: chosen by what the model can do, compared with it at load."""

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from loguru import logger
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.distributed.shard import is_sharded
from grpo.errors import UserError
from grpo.memory import is_out_of_memory
from grpo.memory.recovery import release_cache
from grpo.model.first_layers import first_layers, is_plain
from grpo.model.load import Policy, context_length
from grpo.model.prefill import crossed_window, large_logits, layers_with_window
from grpo.model.stand_ins import MODEL_ERRORS, exact_products
from grpo.model.weights import RolloutModel
from grpo.rollout.arena import Arena, Room
from grpo.rollout.graphs import CUDAGraphs, graphs_of
from grpo.rollout.growing import GrowingArena
from grpo.rollout.static_cache import static_cache_length

_refused = WeakValueDictionary[int, PretrainedConfig]()
"""Configurations, by id, of models that turned out to compute something else over a static cache."""


@dataclass
class ReusableArena:
    """An arena that stays from one rollout to the next, with what was recorded of it."""

    arena: Arena | None = None
    is_oversized: bool = False
    """Whether the last rollout would have done with less."""

    @property
    def nbytes(self) -> int:
        """The cache's bytes; the rest is little."""
        return self.arena.cache_bytes if self.arena else 0

    def release(self) -> None:
        """Let go of it, and of the memory that its recordings have reserved, which plans take for held."""
        has_recordings = self.arena is not None and self.arena.model.device.type == "cuda"
        self.arena = None
        if has_recordings:
            release_cache()


def open_arena(
    model: PreTrainedModel,
    room: Room,
    reusable: ReusableArena | None = None,
    *,
    device_type: str | None = None,
) -> Arena:
    """One with so much room, over a static cache where the model can decode over one.

    reusable: where to find that of an earlier rollout, and to leave it for the next. device_type: of the
    device that a trace stands for.
    """
    reusable = reusable or ReusableArena()
    if reusable.arena is not None:
        there = reusable.arena.room
        if there == room._replace(
            groups=max(room.groups, there.groups), prompt_tokens=max(room.prompt_tokens, there.prompt_tokens)
        ):
            reusable.is_oversized = there != room
            return reusable.arena
        reusable.release()  # before there is another
    reusable.is_oversized = False
    if has_static_cache(model.config):
        reusable.arena = Arena(model, room, step_graphs(model), device_type=device_type)
    else:
        reusable.arena = GrowingArena(model, room)
    return reusable.arena


def step_graphs(model: PreTrainedModel) -> CUDAGraphs | None:
    """What records a model's steps: on CUDA, unless other processes take part in them."""
    if not is_sharded(model) and records_steps(model.config, model.device.type):
        return graphs_of(model.device)
    return None


def records_steps(model: PretrainedConfig, device_type: str) -> bool:
    """Whether decoding runs recorded steps, each for a fixed number of rows, unless the model is sharded."""
    return device_type == "cuda" and has_static_cache(model)


def has_static_cache(model: PretrainedConfig) -> bool:
    """Whether a model hands keys and values to a cache, and calls attention by its name.

    It goes by the model's kind, and by what `check_decoder` found out about the model itself.
    """
    try:
        kind = AutoModelForCausalLM._model_mapping[type(model)]
        layers_with_window(model)
    except (KeyError, ValueError):  # transformers does not know it, or it remembers something else
        return False
    return kind._supports_attention_backend and _refused.get(id(model)) is not model


def prompt_places(model: PretrainedConfig, tokens: int, device_type: str) -> int:
    """Tokens that prompts are padded to while they decode: on CUDA, where steps are recorded, few sizes."""
    if not records_steps(model, device_type):
        return tokens
    return max(tokens, min(-(-tokens // 64) * 64, context_length(model)))


def cache_tokens(model: PretrainedConfig, new_tokens: int) -> int:
    """Places that a row's cache has for its own tokens in the end."""
    return static_cache_length(new_tokens) if has_static_cache(model) else new_tokens


def replaced_at_once(groups: int) -> int:
    """How many of so many groups have to end before others take their places: one prefill serves them."""
    return max(1, groups // 8)


def make_sampler(policy: Policy) -> PreTrainedModel:
    """A policy's model as `RolloutModel` has it, for whoever samples from it and does not train it."""
    check_decoder(policy.model)
    return RolloutModel(policy.model, policy.target.dtype).model


@exact_products()
@torch.no_grad()
def check_decoder(model: PreTrainedModel, *shapes: PretrainedConfig, refuses: bool = True) -> None:
    """Find out on made-up tokens whether a model decodes over a static cache as it does without any.

    Where it does not, and where its kind cannot, a line says that it is over Hugging Face's own cache.
    ValueError for a model that gives something else over that one, too (GPT-Neo, whose attention minds what
    stands between prompt and completion), where such a one `refuses`. shapes: other copies of the model's
    configuration, by which its memory is planned.
    """
    reason = "its attention cannot be called by name"
    if has_static_cache(model.config):
        try:
            difference = _largest_difference(model, Arena)
            if difference < 1e-3:
                return
            reason = f"with a static one its log-probs come out {difference:.3g} nats wrong"
        except MODEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0].rstrip(".")
        _refused.update({id(config): config for config in (model.config, *shapes)})
    name = type(model).__name__
    if refuses and (wrong := _what_is_wrong_over_a_cache(model)) is not None:
        raise UserError(f"{name} cannot be sampled from here: {wrong}; choose another --model.")
    logger.info("{} decodes over Hugging Face's growing cache, which is slower: {}", name, reason)


def _what_is_wrong_over_a_cache(model: PreTrainedModel) -> str | None:
    try:
        difference = _largest_difference(model, GrowingArena)
    except MODEL_ERRORS as error:
        if is_out_of_memory(error):
            raise
        return f"it does not run over a cache ({(str(error).splitlines() or [type(error).__name__])[0]})"
    return None if difference < 1e-3 else f"over a cache its log-probs come out {difference:.3g} nats wrong"


def _largest_difference(model: PreTrainedModel, kind: type[Arena]) -> float:
    """The largest `_difference`, at logits as they are and at large ones, in fp32.

    bf16, or products of quantized weights, round log-probs by 0.05 nats, as much as a window that is one
    token too wide changes them: the first layers of such a model are compared in fp32, on the host where its
    device has no room for them.
    """
    if model.dtype.itemsize >= 4 and all(map(is_plain, model.parameters())):
        return _both_differences(model, kind)
    try:
        return _both_differences(first_layers(model, model.device), kind)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_cache()
    return _both_differences(first_layers(model, torch.device("cpu")), kind)


def _both_differences(model: PreTrainedModel, kind: type[Arena]) -> float:
    difference = _difference(model, kind)
    with large_logits(model):
        return max(difference, _difference(model, kind))


def _difference(model: PreTrainedModel, kind: type[Arena]) -> float:
    """The largest between log-probs (nats) as sampled and of the model's own forward pass over whole texts.

    Of two groups, and where groups may join later a third that takes the second's place.
    """
    longest, generator = min(280, context_length(model.config) - 3), torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    texts = [torch.randint(vocabulary, (n,), generator=generator) for n in (longest, 5, 9)]
    uniforms = torch.rand(4, 3, generator=generator).to(model.device)
    differences: list[Tensor] = []

    def compare(text: Tensor, place: int) -> None:
        ids, logp, lengths, _ = arena.rows([place])
        ids = ids[:, : lengths.max()]  # (2, n)
        whole = torch.cat([text.to(ids.device).expand(2, -1), ids], 1)
        logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False).logits
        expected = logits[:, len(text) - 1 : -1].log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)
        differences.append((logp[:, : lengths.max()] - expected).abs().max())

    with crossed_window(model, longest):
        arena = kind(model, Room(2, 2, longest, 3, ends=()))
        arena.restart(SamplingSettings(max_new_tokens=3), 2)
        arena.fill({0: 0, 1: 1}, [text.tolist() for text in texts[:2]], uniforms)
        arena.advance()
        compare(texts[1], 1)
        if not arena.joins:
            compare(texts[0], 0)
            return torch.stack(differences).max().item()
        arena.fill({1: 2}, [texts[2].tolist()], uniforms[:2])
        arena.advance()
        arena.advance()
        compare(texts[0], 0)
        compare(texts[2], 1)
    return torch.stack(differences).max().item()
