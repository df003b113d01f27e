"""Decoding one token at a time over a prompt that is computed and stored once a group.

A decoder is made for a model and used for one batch of groups:

    logits = decoder.prefill(prompt_ids, rows_per_prompt)   # (R, V)
    key, step = decoder.next_step()
    logits = step(tokens)                                   # (R, V), tokens (R,)
    decoder.keep(groups, places)                            # finished groups leave, others move to the front
    logits = decoder.replace(groups, prompt_ids)            # (…, V): others take finished groups' places
    decoder.cache_bytes                                     # what keys and values take up

Rows stand group by group: row r belongs to prompt r // rows_per_prompt.
"""

import torch
from loguru import logger
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grpo.distributed.shard import is_sharded
from grpo.memory import is_out_of_memory
from grpo.model.load import context_length
from grpo.model.prefill import crossed_window, layers_with_window
from grpo.model.stand_ins import NEVER, exact_products
from grpo.rollout.cuda_graphs import Recorder, recorder_of
from grpo.rollout.generic import GenericDecoder
from grpo.rollout.native import NativeDecoder
from grpo.rollout.static_cache import static_cache_length

Decoder = NativeDecoder | GenericDecoder


def make_decoder(model: PreTrainedModel, max_new_tokens: int, *, recorded: bool = False) -> Decoder:
    """Over a static cache where the model's attention can be ours, else over Hugging Face's own.

    recorded: steps of one key are the same work on the same tensors.
    """
    if not has_static_cache(model):
        return GenericDecoder(model)
    return NativeDecoder(model, max_new_tokens, recorded=recorded)


def step_recorder(model: PreTrainedModel) -> Recorder | None:
    """By which a model's steps are recorded: where it has a static cache, and on CUDA."""
    if has_static_cache(model) and records_steps(model.config, model.device.type):
        return recorder_of(model.device)
    return None


def records_steps(model: PretrainedConfig, device_type: str) -> bool:
    """Whether decoding runs recorded steps, each for a fixed number of rows, unless the model is sharded."""
    return device_type == "cuda" and _is_native(model)


def has_static_cache(model: PreTrainedModel) -> bool:
    """Whether a decoder of this model holds `max_new_tokens` from the start, or grows."""
    return not is_sharded(model) and _is_native(model.config)


def _is_native(model: PretrainedConfig) -> bool:
    """Whether a model of this kind hands keys and values to a cache, and calls attention by its name."""
    if model.model_type in _refused or not _calls_attention_by_name(type(model)):
        return False
    try:
        layers_with_window(model)
    except ValueError:
        return False
    return True


_refused: set[str] = set()
"""Kinds of models, for as long as the process lives, that turned out to compute something else."""


@exact_products()
@torch.no_grad()
def check_decoder(model: PreTrainedModel) -> None:
    """Find out on made-up tokens whether a model decodes over a static cache as it does without any.

    Where it does not, and where its kind cannot, a line says that it is over Hugging Face's own cache.
    """
    if is_sharded(model):
        return
    reason = "its attention cannot be called by name"
    if _is_native(model.config):
        try:
            difference = _difference(model)
            if difference < 1e-3:
                return
            reason = f"with a static one its log-probs come out {difference:.3g} nats wrong"
        except (TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0].rstrip(".")
        _refused.add(model.config.model_type)
    logger.info(
        "{} decodes over Hugging Face's growing cache, which is slower: {}", type(model).__name__, reason
    )


def _difference(model: PreTrainedModel) -> float:
    """The largest between log-probs of the decoder and of whole texts, in nats."""
    longest = min(280, context_length(model.config) - 3)
    with crossed_window(model, longest):
        return _difference_at(model, longest)


def _difference_at(model: PreTrainedModel, longest: int) -> float:
    config = model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in (longest, 5, 9)]
    decoder = NativeDecoder(model, 3)
    logits = decoder.prefill(texts[:2], 1)
    differences = []
    for turn in range(3):
        if turn == 1:  # another takes the second's place
            texts[1] = texts.pop()
            logits[1:] = decoder.replace([1], texts[1:])
        for text, ours in zip(texts, logits, strict=False):
            ids = torch.tensor([text], device=model.device)
            theirs = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]
            differences.append((_logp(ours) - _logp(theirs)).abs().max())
        tokens = torch.tensor([turn, 3 - turn], device=model.device) % config.vocab_size
        for text, token in zip(texts, tokens.tolist(), strict=False):
            text.append(token)
        logits = decoder.next_step()[1](tokens)
    return torch.stack(differences).max().item()


def _logp(logits: Tensor) -> Tensor:
    """Log-probs, alike of all tokens that are never sampled."""
    return logits.log_softmax(-1).clamp(min=NEVER)


def _calls_attention_by_name(kind: type[PretrainedConfig]) -> bool:
    try:
        model = AutoModelForCausalLM._model_mapping[kind]
    except KeyError:  # not known to transformers
        return False
    return bool(model._supports_attention_backend)


FEW_ROWS = 64
"""On CUDA so many rows of a small model take as long as one."""


def remaining_places(places: int, going_on: int, width: int) -> int:
    """Places for groups of `width` rows that go on where steps are recorded: of all, a half, a quarter and so
    on, as recordings are for a number of rows; fewer than FEW_ROWS rows save nothing.
    """
    while places > 1 and -(-places // 2) >= going_on and -(-places // 2) * width >= FEW_ROWS:
        places = -(-places // 2)
    return places


def prompt_places(model: PretrainedConfig, tokens: int, device_type: str) -> int:
    """Tokens that prompts are padded to while they decode: on CUDA, where steps are recorded, few sizes."""
    if not records_steps(model, device_type):
        return tokens
    return max(tokens, min(-(-tokens // 64) * 64, context_length(model)))


def replaced_at_once(groups: int) -> int:
    """How many of so many groups have to end before others take their places: one prefill serves them."""
    return max(1, groups // 8)


def cache_tokens(model: PretrainedConfig, new_tokens: int) -> int:
    """Places a row's cache has for its own tokens: a static one has whole blocks."""
    return static_cache_length(new_tokens) if _is_native(model) else new_tokens
