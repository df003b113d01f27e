"""Log-probs of given completions, under policy (with gradients) or reference (without), and of texts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError
from transformers import PreTrainedModel

from grpo.forward import completion_hidden, text_hidden
from grpo.logprobs import completion_logprobs
from grpo.memory import Shape
from grpo.shard import inside, whole
from grpo.values import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a rollout, trimmed to their own longest prompt and completion.

    Without a mask every token counts: shapes are then known beforehand, so that fake tensors can
    trace what is done with a micro-batch.
    """

    rows: Tensor  # (R,) their places in the rollout
    prompt_ids: list[list[int]]
    row_to_prompt: Tensor  # (R,)
    completion_ids: Tensor  # (R, C)
    mask: Tensor | None = None  # (R, C)


def micro_batches(rollout: Rollout, rows: int) -> Iterator[MicroBatch]:
    """All N rows, at most `rows` at a time: groups of like length together, whole where they fit."""
    group_size = rollout.group_size
    longest = rollout.lengths.view(-1, group_size).amax(1)  # (B,)
    prompt_lengths = torch.tensor([len(ids) for ids in rollout.prompt_ids])
    groups = torch.argsort(longest + prompt_lengths, stable=True)
    order = (groups.unsqueeze(1) * group_size + torch.arange(group_size)).flatten()  # (N,)
    if rows >= group_size:
        rows -= rows % group_size
    for chunk in order.split(rows):
        prompts, row_to_prompt = torch.unique(chunk // group_size, return_inverse=True)
        width = max(1, int(rollout.lengths[chunk].max()))
        yield MicroBatch(
            rows=chunk,
            prompt_ids=[rollout.prompt_ids[prompt] for prompt in prompts],
            row_to_prompt=row_to_prompt,
            completion_ids=rollout.completion_ids[chunk, :width],
            mask=rollout.mask[chunk, :width],
        )


def micro_batch_shapes(rollout: Rollout, rows: int) -> list[Shape]:
    """What the memory of each of `micro_batches` depends on."""
    return [
        Shape(
            rows=len(batch.rows),
            prompt_tokens=max(map(len, batch.prompt_ids)),
            new_tokens=batch.completion_ids.shape[1],
            scored_tokens=int(rollout.lengths[batch.rows].sum()),
        )
        for batch in micro_batches(rollout, rows)
    ]


def micro_batch_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    temperature: float,
    dtype: torch.dtype,
    entropy: bool = False,
    checkpoint: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (R, C) of a micro-batch's tokens on the model's device, 0 on the padding.

    Of the temperature-scaled, untruncated distribution; entropies (R, C) on request. `dtype` is
    what matrix products are computed in. `checkpoint`: activations are recomputed in the backward pass.
    """
    device = model.device

    def work() -> tuple[Tensor, Tensor | None]:
        with computing_in(dtype, device):
            hidden = completion_hidden(
                model, batch.prompt_ids, batch.row_to_prompt, batch.completion_ids, checkpoint=checkpoint
            )
            head = model.get_output_embeddings()
            return completion_logprobs(
                hidden, head.weight, batch.completion_ids.to(device),
                None if batch.mask is None else batch.mask.to(device),
                bias=head.bias, temperature=temperature, entropy=entropy,
            )  # fmt: skip

    return inside(model, work)


def window_logprobs(model: PreTrainedModel, windows: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Log-probs (R, T) of each token but the first of `windows` (R, T + 1), in nats."""
    windows = windows.to(model.device)
    with computing_in(dtype, model.device):
        hidden = text_hidden(model, windows[:, :-1])  # (R, T, D)
        head = model.get_output_embeddings()
        logp, _ = completion_logprobs(hidden, head.weight, windows[:, 1:], bias=head.bias)
    return logp


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Matrix products inside are computed in `dtype`, where it is lower than the weights' own."""
    lower = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype=dtype if lower else torch.bfloat16, enabled=lower)


@torch.no_grad()
def check_scorer(model: PreTrainedModel, context: int, *, checkpoint: bool = False) -> None:
    """ValueError unless log-probs are those of the model's own forward pass, on made-up tokens.

    They are not for a model that does more to its logits than a linear layer does (Gemma 2, Cohere,
    Granite), or whose attention minds what stands between prompt and completion (GPT-Neo).
    With `checkpoint`, gradients must also be the same when activations are recomputed.
    """
    batch = _made_up_batch(model, context)
    try:
        ours, _ = micro_batch_logprobs(model, batch, temperature=1.0, dtype=model.dtype)
    except (TypeError, AttributeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{type(model).__name__} cannot be trained here: {error}") from error
    for row, prompt in enumerate(batch.prompt_ids):
        ids = torch.cat([torch.tensor(prompt), batch.completion_ids[row]]).to(model.device)
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, -5:-1]
        theirs = logits.log_softmax(-1).gather(1, ids[-4:].unsqueeze(1)).squeeze(1)
        difference = (ours[row] - theirs).abs().max().item()
        if not difference < 1e-3:
            raise ValueError(
                f"{type(model).__name__} cannot be trained here: its log-probs come out {difference:.3g} "
                "nats wrong, so its head or its attention is of a kind that is not supported; "
                "choose another --model."
            )
    if checkpoint:
        check_recomputation(model, context)


def _made_up_batch(model: PreTrainedModel, context: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.get_input_embeddings().num_embeddings, (2, 280), generator=generator)
    length = min(280, context)
    prompts, completions = [tokens[0, : length - 4].tolist(), tokens[1, :5].tolist()], tokens[:, -4:]
    return MicroBatch(torch.arange(2), prompts, torch.arange(2), completions)


def check_recomputation(model: PreTrainedModel, context: int) -> None:
    """ValueError unless all gradients are the same when activations are recomputed, on made-up tokens."""
    _check_recomputation(model, _made_up_batch(model, context))


@torch.enable_grad()
def _check_recomputation(model: PreTrainedModel, batch: MicroBatch) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(checkpoint: bool) -> list[Tensor]:
        logp, _ = micro_batch_logprobs(
            model, batch, temperature=1.0, dtype=model.dtype, checkpoint=checkpoint
        )
        logp.sum().backward()  # type: ignore[no-untyped-call]
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        model.zero_grad(set_to_none=True)
        return found

    plain = gradients(checkpoint=False)
    try:
        pairs = zip(gradients(checkpoint=True), plain, strict=True)
        difference = math.hypot(*(whole((one - other).norm()).item() for one, other in pairs))
        difference /= math.hypot(*(whole(gradient.norm()).item() for gradient in plain))
        reason = f"its gradients come out {difference:.3g} wrong, relative to their norm"
    except CheckpointError as error:
        model.zero_grad(set_to_none=True)
        difference, reason = math.inf, str(error).splitlines()[0].rstrip(".")
    if not difference < 1e-3:
        raise ValueError(
            f"gradient_checkpointing is on, but {type(model).__name__} cannot be recomputed layer by layer: "
            f"{reason}; leave it off (fewer train_rows need less memory, too)."
        )


@torch.no_grad()
def score(
    model: PreTrainedModel, rollout: Rollout, *, rows: int, temperature: float, dtype: torch.dtype
) -> Tensor:
    """Log-probs (N, C) of a whole rollout without gradients, on the CPU, `rows` at a time."""
    logp = torch.zeros(rollout.completion_ids.shape, dtype=torch.promote_types(model.dtype, torch.float32))
    for batch in micro_batches(rollout, rows):
        part, _ = micro_batch_logprobs(model, batch, temperature=temperature, dtype=dtype)
        logp[batch.rows, : part.shape[1]] = part.cpu().to(logp.dtype)
    return logp
