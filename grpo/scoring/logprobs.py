"""Log-probs of given completions, under policy (with gradients) or reference (without)."""

from collections.abc import Iterable
from functools import partial
from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing
from grpo.distributed.shard import run_gathered
from grpo.model.activation_checkpointing import recomputed_layers
from grpo.model.attention import reading_streams
from grpo.model.head import LogitRule
from grpo.model.numerics import computing_in
from grpo.model.prefill import sliding_window, without_pad_token_id
from grpo.model.transfer import to_device
from grpo.model.ways import reading_of
from grpo.scoring.head import LMHeadOutput, LogpGradFn, chunked_lm_head
from grpo.scoring.packing import streams
from grpo.scoring.stream import Stream
from grpo.types import Batch


def token_states(model: PreTrainedModel, stream: Stream, *, checkpointing: Checkpointing = "none") -> Tensor:
    """Returns the hidden states (K, D) that predict the stream's tokens; the stream is on the model's device.

    checkpointing: see `recomputed_layers`. ValueError for a model whose layers cannot be run so.
    """
    if reading_of(model) != "streams":
        return _states_of_whole_texts(model, stream, checkpointing)
    attention = stream.attention.for_pass(sliding_window(model.config), recomputed=checkpointing == "full")
    reading = partial(reading_streams, model.config)
    with recomputed_layers(model, checkpointing, inside=reading), reading():
        hidden: Tensor = model.base_model(
            input_ids=stream.ids,
            # Of four dimensions, a mask is handed through to attention, which reads `stream` instead.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device),
            position_ids=stream.positions,
            use_cache=False,
            stream=attention,
        ).last_hidden_state
    return hidden[0].index_select(0, stream.states)


def _states_of_whole_texts(model: PreTrainedModel, stream: Stream, checkpointing: Checkpointing) -> Tensor:
    """Returns the same by the model's own pass over whole texts, each row behind a prompt of its own.

    Texts are padded on the right, behind all that a causal model reads, or go through beside others of their
    length alone. The model is told ids and nothing else: positions count from 0, and padding needs no mask.
    """
    texts = stream.layout.whole_texts()
    parts = [texts] if reading_of(model) == "padded rows" else texts.by_length()
    states = list[Tensor]()
    with recomputed_layers(model, checkpointing), without_pad_token_id(model):
        for part in parts:
            ids = stream.ids[0][torch.tensor(part.places).to(model.device)]
            output = model.base_model(input_ids=ids, use_cache=False)
            states.append(output.last_hidden_state.flatten(0, 1))
    begins, row, place = to_device(
        [torch.tensor(texts.own_starts(parts)), stream.row, stream.place], model.device
    )
    of_all = states[0] if len(states) == 1 else torch.cat(states)
    return of_all.index_select(0, begins[row] + place - 1)


def token_logprobs(
    model: PreTrainedModel,
    stream: Stream,
    *,
    temperature: float,
    dtype: torch.dtype,
    fp32_logits: bool = False,
    entropy: bool = False,
    slope: LogpGradFn | None = None,
    per_token: bool = True,
    checkpointing: Checkpointing = "none",
    traced: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies (or zeros) of a stream's K tokens, (K,) each, on the model's device.

    The distribution is the temperature-scaled, untruncated one. dtype: what matrix products are computed in;
    fp32_logits: the head's are not rounded to it.
    With `slope`, see `chunked_lm_head`, gradients are added to the parameters' `.grad`. per_token: whether
    the slope at a token depends on its log-prob alone; if not, all are computed first, and the head is
    multiplied again. checkpointing: see `recomputed_layers`. traced: the device whose memory a trace is of.
    """
    device = model.device
    stream, _ = stream.to(device)

    def work() -> tuple[Tensor, LMHeadOutput]:
        with computing_in(dtype, device), torch.set_grad_enabled(slope is not None):
            states = token_states(model, stream, checkpointing=checkpointing)
            head = model.get_output_embeddings()
            scores = partial(
                chunked_lm_head,
                states.detach(),
                head.weight,
                stream.targets,
                bias=head.bias,
                temperature=temperature,
                rule=LogitRule.of(model.config),
                fp32_logits=fp32_logits,
                entropy=entropy,
                device=traced,
            )
            if slope is None or per_token:
                return states, scores(slope=slope)
            logp = scores(entropy=False).logp
            slopes = slope(logp, slice(0, len(logp)))
            return states, scores(slope=lambda _, part: slopes[part])

    states, scored = run_gathered(model, work)
    if scored.hidden_gradient is not None and states.requires_grad:
        states.backward(scored.hidden_gradient)  # type: ignore[no-untyped-call]
    return scored.logp, scored.entropy


class ScoringOptions(TypedDict):
    """How log-probs are computed, see `token_logprobs`."""

    temperature: float
    dtype: torch.dtype
    fp32_logits: NotRequired[bool]
    traced: NotRequired[torch.device | None]


def score(
    model: PreTrainedModel,
    batch: Batch,
    *,
    rows: int,
    longest: tuple[int, int] | None = None,
    of_equal_rows: bool = False,
    **options: Unpack[ScoringOptions],
) -> Tensor:
    """Returns log-probs (K,) of a batch's tokens without gradients, on the host; in parts, see `streams`."""
    parts = streams(batch, rows, longest=longest, of_equal_rows=of_equal_rows)
    return score_streams(model, batch, parts, **options)


@torch.no_grad()
def score_streams(
    model: PreTrainedModel,
    batch: Batch,
    parts: Iterable[Stream],
    **options: Unpack[ScoringOptions],
) -> Tensor:
    """Returns what `score` does, of a batch that comes in these streams."""
    exact = torch.promote_types(model.dtype, torch.float32)
    logp = torch.zeros(len(batch.ids), dtype=exact, device=model.device)
    for stream in parts:
        there, (tokens,) = stream.to(model.device, stream.tokens)
        scored, _ = token_logprobs(model, there, **options)
        logp[tokens] = scored.to(exact)
    return logp.cpu()
