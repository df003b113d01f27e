"""Prompts once a group in TRL's scoring and learning.

TRL puts each completion behind its prompt, so a prompt with eight completions is computed, and held for the
backward pass, eight times. Here the model's backbone computes it once, in a stream with its completions.
All that follows from the hidden states (head, log-probs, loss, metrics) is TRL's, but that it is given
completions alone: without Triton its head takes every column. Positions are TRL's, too: a token's is its
column, padding on the left included.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from grpo.errors import UserError
from grpo.model.activation_checkpointing import may_recompute_itself
from grpo.model.first_layers import is_plain
from grpo.model.load import context_length
from grpo.model.numerics import without_tf32
from grpo.model.prefill import pad_prompts, shrunk_sliding_window
from grpo.model.ways import reading_of
from grpo.scoring.logprobs import token_states
from grpo.scoring.model_checks import made_up
from grpo.scoring.stream import Texts
from grpo.trl.sampling import base_model, why_peft_must_run

_PADDING = -1
_NOT_SHARED = "position_ids", "token_type_ids", "inputs_embeds", "past_key_values"
"""Arguments of a backbone that are each row's own, none of which TRL gives."""


def unlike_prompts(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the unlike ones of prompts (R, P), padded on the left, and which of them each row has (R,).

    -1 stands where there is padding. None where that saves nothing: most rows have a prompt of their own.
    """
    unlike, row_to_prompt = _unique(torch.where(mask.bool(), ids, _PADDING))
    return None if 2 * len(unlike) > len(row_to_prompt) else (unlike, row_to_prompt)


def _read(unlike: Tensor, row_to_prompt: Tensor, ids: Tensor, mask: Tensor) -> Texts:
    """Reads unlike prompts (b, P), which one each row has (R,), and completions (R, C), as lists."""
    prompts = [[token for token in row if token != _PADDING] for row in unlike.tolist()]
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    lengths = (mask * columns).amax(1).tolist()  # what pads completions is not computed
    rows = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
    return Texts(prompts, row_to_prompt.tolist(), rows)


def _unique(rows: Tensor) -> tuple[Tensor, Tensor]:
    return torch.unique(rows, dim=0, return_inverse=True)


@contextmanager
def shared_prompts(
    model: PreTrainedModel, texts: Tensor, mask: Tensor, tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inside, the model's backbone takes the ends of these texts (R, P + C) for the whole of them.

    tokens: C, of the completions. Gives the ends, ids and mask (R, C + 1): completions, and the token before
    them. The backbone is given those row by row, any number at once. Its hidden states (r, C + 1, D) are
    those from which completions are predicted, and zeros at the last place.
    """
    backbone: nn.Module = model.base_model
    before, plain = vars(backbone).get("forward"), backbone.forward
    width, done = texts.shape[1] - tokens, 0

    def restore() -> None:
        del backbone.forward  # the class's shows again
        if before is not None:
            backbone.forward = before

    def forward(input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        nonlocal done
        if told := [name for name in _NOT_SHARED if options.get(name) is not None]:
            raise UserError(
                f"prompts are shared by a model that is given {told[0]}: set share_prompts=False."
            )
        rows = slice(done, done + len(input_ids))
        done = rows.stop
        ids = texts[rows]
        unlike = unlike_prompts(ids[:, :width], mask[rows, :width])
        if unlike is None:
            output = plain(input_ids=ids, attention_mask=mask[rows], **options)
            output.last_hidden_state = output.last_hidden_state[:, width - 1 :]
            return output
        is_told = backbone.training and getattr(backbone, "gradient_checkpointing", False)
        recomputes = is_told and torch.is_grad_enabled()
        restore()
        try:
            there = _read(*unlike, ids[:, width:], mask[rows, width:])
            # Positions as TRL counts them: by column, padding on the left included.
            first = [width - len(prompt) for prompt in there.prompts]
            host = there.stream(first_positions=first)
            stream, (at,) = host.to(ids.device, host.row * (tokens + 1) + host.place)
            with _without_transformers_checkpointing(backbone):
                states = token_states(model, stream, checkpointing="full" if recomputes else "none")
        finally:
            backbone.forward = forward
        hidden = states.new_zeros(len(ids) * (tokens + 1), states.shape[-1]).index_copy(0, at, states)
        hidden = hidden.view(len(ids), tokens + 1, -1)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    backbone.forward = forward
    try:
        yield texts[:, width - 1 :], mask[:, width - 1 :]
    finally:
        restore()


@contextmanager
def _without_transformers_checkpointing(backbone: Any) -> Iterator[None]:
    """Inside, a backbone that would recompute its layers takes a cache, which it would drop otherwise."""
    was_on = getattr(backbone, "gradient_checkpointing", False)
    if was_on:
        backbone.gradient_checkpointing = False
    try:
        yield
    finally:
        if was_on:
            backbone.gradient_checkpointing = True


def may_share_prompts(trainer: Any, *, try_it: bool = True) -> bool:
    """Whether a trainer of TRL's may compute a group's prompt once.

    Where it would come out otherwise a line says why. try_it: whether that is tried out, which takes weights.
    """
    model = base_model(trainer.accelerator.unwrap_model(trainer.model))
    if trainer.is_sharded or trainer._is_vlm or has_dropout(model):
        return False
    wrong = why_peft_must_run(trainer.accelerator.unwrap_model(trainer.model))
    if wrong is None and try_it:
        wrong = check_shared_prompts(model, context_length(model.config))
    if trainer.args.gradient_checkpointing and not may_recompute_itself(model):
        wrong = "layers are recomputed by transformers itself, without a cache"
    if wrong is not None:
        logger.info("each completion is scored behind a prompt of its own: {}", wrong)
    return wrong is None


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


@without_tf32()
@torch.no_grad()
def check_shared_prompts(model: PreTrainedModel, context: int) -> str | None:
    """Says what is wrong where hidden states are not the model's own, on made-up tokens; None where they are.

    In prompts of one length, and of two, padded on the left as TRL does.
    """
    if reading_of(model) != "streams":
        return f"{type(model).__name__} does not hand its attention on to others"
    length, tokens = min(280, context), 4
    is_exact = model.dtype.itemsize >= 4 and all(map(is_plain, model.parameters()))
    allowed = 1e-3 if is_exact else 0.05
    with shrunk_sliding_window(model, length):
        for equal in (True, False):
            rows = made_up(model, length, equal=equal).whole()
            texts = pad_prompts([row for row in rows for _ in range(2)]).to(model.device).moved_left()
            ids, mask = texts.ids, texts.mask.long()
            run = partial(model.base_model, use_cache=False)
            try:
                expected = run(input_ids=ids, attention_mask=mask).last_hidden_state[:, -tokens - 1 :]
                with shared_prompts(model, ids, mask, tokens) as (ends, ends_mask):
                    shared = run(input_ids=ends, attention_mask=ends_mask).last_hidden_state
            except (TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}".splitlines()[0]
            expected, shared = expected[:, :-1].float(), shared[:, :-1].float()
            difference = ((shared - expected).norm() / expected.norm()).item()
            if not difference < allowed:  # nor is it, where one is NaN
                return f"hidden states come out {difference:.3g} of their size wrong"
    return None
