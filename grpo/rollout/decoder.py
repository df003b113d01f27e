"""The arena that a model decodes in: chosen by what the model can do, compared with it at load."""

from dataclasses import dataclass

import torch
from loguru import logger
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.distributed.shard import is_sharded
from grpo.errors import UserError
from grpo.memory import is_out_of_memory
from grpo.memory.recovery import release_cache
from grpo.model.first_layers import first_layers, is_plain
from grpo.model.load import Policy, context_length
from grpo.model.numerics import MODEL_ERRORS, without_tf32
from grpo.model.prefill import large_logits, shrunk_sliding_window
from grpo.model.ways import DECODING, Decoding, choose_decoding, decoding_of, why_not_fastest
from grpo.model.weights import RolloutModel
from grpo.rollout.arena import Arena
from grpo.rollout.graphs import CUDAGraphs, graphs_of
from grpo.rollout.growing import ArenaByLength, ArenaByRow, ArenaWithoutCache, DynamicCacheArena
from grpo.rollout.room import DecodeCapacity

_CHECKED_TOKENS = 6
"""That a row has sampled when `check_decoder` compares them."""
ARENAS: dict[Decoding, type[Arena]] = {
    "a static cache": Arena,
    "padded rows": DynamicCacheArena,
    "rows of one length": ArenaByLength,
    "rows one by one": ArenaByRow,
    "whole texts": ArenaWithoutCache,
}


@dataclass
class ArenaCache:
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
    room: DecodeCapacity,
    reusable: ArenaCache | None = None,
    *,
    device_type: str | None = None,
) -> Arena:
    """One with so much room, over a static cache where the model can decode over one.

    reusable: where to find that of an earlier rollout, and to leave it for the next. device_type: of the
    device that a trace stands for.
    """
    reusable = reusable or ArenaCache()
    if reusable.arena is not None:
        there, counts = reusable.arena.room, ("rows", "prompts", "pages", "prompt_tokens")
        if there == room._replace(
            **{name: max(getattr(there, name), getattr(room, name)) for name in counts}
        ):
            reusable.is_oversized = there != room
            return reusable.arena
        reusable.release()  # before there is another
    reusable.is_oversized = False
    way = decoding_of(model.config)
    if way == "a static cache":
        reusable.arena = Arena(model, room, step_graphs(model), device_type=device_type)
    else:
        reusable.arena = ARENAS[way](model, room)
    return reusable.arena


def step_graphs(model: PreTrainedModel) -> CUDAGraphs | None:
    """Returns the recorder of a model's steps: on CUDA, unless other processes take part in them."""
    if not is_sharded(model) and records_steps(model.config, model.device.type):
        return graphs_of(model.device)
    return None


def records_steps(model: PretrainedConfig, device_type: str) -> bool:
    """Whether decoding runs recorded steps, each for a fixed number of rows, unless the model is sharded."""
    return device_type == "cuda" and has_static_cache(model)


def has_static_cache(model: PretrainedConfig) -> bool:
    """Whether a model decodes over a static cache: by its kind, or by what `check_decoder` found out."""
    return decoding_of(model) == "a static cache"


def joins_rows(model: PreTrainedModel) -> bool:
    """Whether rows may begin while others decode, and take their pages one by one."""
    return has_static_cache(model.config) and not is_sharded(model)


def padded_prompt_length(model: PretrainedConfig, tokens: int, device_type: str) -> int:
    """Tokens that prompts are padded to while they decode: on CUDA, where steps are recorded, few sizes."""
    if not records_steps(model, device_type):
        return tokens
    return max(tokens, min(-(-tokens // 64) * 64, context_length(model)))


def make_sampler(policy: Policy) -> PreTrainedModel:
    """A policy's model as `RolloutModel` has it, for whoever samples from it and does not train it."""
    check_decoder(policy.model)
    return RolloutModel(policy.model, policy.target.dtype).model


def check_decoder(model: PreTrainedModel, *shapes: PretrainedConfig) -> None:
    """Chooses a way to sample from a model, see `choose_decoder`. ValueError where none serves."""
    if wrong := choose_decoder(model, *shapes):
        name = type(model).__name__
        raise UserError(f"{name} cannot be sampled from here: {wrong}; choose another --model.")


@without_tf32()
@torch.no_grad()
def choose_decoder(model: PreTrainedModel, *shapes: PretrainedConfig) -> str | None:
    """Chooses the first way to sample from a model whose log-probs are those of its own forward pass.

    They are compared on made-up tokens. A line says where it is not over a static cache. Returns what is
    wrong where no way serves, else None. shapes: other copies of the model's configuration, by which its
    memory is planned.
    """
    name = type(model).__name__
    reason = why_not_fastest(type(model), model.config) or "its kind is not in transformers' list"
    for way in DECODING[DECODING.index(decoding_of(model.config)) :]:
        choose_decoding(way, model.config, *shapes)
        wrong = _what_is_wrong(model, ARENAS[way])
        if wrong is None:
            if way != "a static cache":
                over = "no cache" if way == "whole texts" else "the growing cache of transformers"
                logger.info("{} decodes over {}, in {}, which is slower: {}", name, over, way, reason)
            return None
        reason = wrong
    return reason


def _what_is_wrong(model: PreTrainedModel, kind: type[Arena]) -> str | None:
    try:
        difference = _largest_difference(model, kind)
    except MODEL_ERRORS as error:
        if is_out_of_memory(error):
            raise
        return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return None if difference < 1e-3 else f"its log-probs come out {difference:.3g} nats wrong"


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

    Of two rows each of two prompts, one of which leaves, with pages that end within the text; where rows may
    join later one of a third prompt, in its place.
    """
    longest, generator = (
        min(280, context_length(model.config) - _CHECKED_TOKENS),
        torch.Generator().manual_seed(0),
    )
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    texts = [torch.randint(vocabulary, (n,), generator=generator) for n in (longest, 5, 9)]
    uniforms = torch.rand(5, _CHECKED_TOKENS, generator=generator).to(model.device)
    differences: list[Tensor] = []

    def compare(row: int, group: int) -> None:
        place = next(place for place, slot in enumerate(arena.slots) if slot.row == row)
        ids, logp, lengths, _ = arena.sampled([place])
        ids = ids[:, : lengths[0]]  # (1, n)
        whole = torch.cat([texts[group].to(ids.device).unsqueeze(0), ids], 1)
        logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False).logits
        expected = (
            logits[:, len(texts[group]) - 1 : -1].log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)
        )
        differences.append((logp[:, : lengths[0]] - expected).abs().max())

    def advance(tokens: int) -> None:
        for _ in range(tokens):
            arena.add_pages([slot for slot in arena.slots if arena.lacks_page(slot, 1)])
            arena.decode_step()

    with shrunk_sliding_window(model, longest):
        arena = kind(model, DecodeCapacity.of(4, 3, 2, longest, _CHECKED_TOKENS, page=2))
        arena.reset(SamplingSettings(max_new_tokens=_CHECKED_TOKENS))
        arena.encode({group: text.tolist() for group, text in enumerate(texts[: 2 + arena.supports_refill])})
        arena.begin({0: 0, 1: 0, 2: 1, 3: 1}, uniforms[:4])
        advance(2)
        compare(3, 1)
        arena.leave([1])
        if arena.supports_refill:
            arena.begin({4: 2}, uniforms[4:])
        advance(3)
        compare(0, 0)
        compare(2, 1)
        if arena.supports_refill:
            compare(4, 2)
    return torch.stack(differences).max().item()
