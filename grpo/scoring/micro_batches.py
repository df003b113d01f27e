"""Log-probs of given completions, under policy (with gradients) or reference (without)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing
from grpo.distributed.shard import run_gathered
from grpo.memory import Size
from grpo.memory.rows import positions
from grpo.model.prefill import PromptBatch, pad_prompts
from grpo.model.transfer import to_device
from grpo.scoring.forward import completion_hidden
from grpo.scoring.head import HeadPass, Slope, head_pass
from grpo.types import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a rollout, trimmed to their own longest prompt and completion.

    Where it is not said which tokens are scored, all are: shapes are then known beforehand, so that fake
    tensors can trace what is done with a micro-batch.
    """

    rows: Tensor  # (R,) their places in the rollout, on the host
    prompts: PromptBatch
    row_to_prompt: Tensor  # (R,)
    completion_ids: Tensor  # (R, C)
    scored: Tensor | None = None  # (K,) places among the R·C tokens

    def to(
        self, device: torch.device, others: Mapping[str, Tensor | None] | None = None
    ) -> tuple["MicroBatch", dict[str, Tensor]]:
        """On a device, in one copy with others that belong to it; those that are None are left out."""
        tensors = {name: getattr(self, name) for name in ("row_to_prompt", "completion_ids", "scored")}
        to_move = {
            name: tensor for name, tensor in {**tensors, **(others or {})}.items() if tensor is not None
        }
        ids, lengths, *tensors_there = to_device(
            [self.prompts.ids, self.prompts.lengths, *to_move.values()], device
        )
        moved = dict(zip(to_move, tensors_there, strict=True))
        tensors = {name: moved.pop(name) for name in tensors if name in moved}
        prompts = PromptBatch(ids, lengths, self.prompts.is_padded)
        return replace(self, prompts=prompts, **tensors), moved

    def padded(self, values: Tensor) -> Tensor:
        """Values (K,) of the scored tokens in the shape of completions (R, C), 0 elsewhere."""
        shape = self.completion_ids.shape
        if self.scored is None:
            return values.view(shape)
        return values.new_zeros(shape.numel()).index_copy(0, self.scored, values).view(shape)


def micro_batches(
    rollout: Rollout, rows: int, *, mask: Tensor | None = None, pass_tokens: int | None = None
) -> Iterator[MicroBatch]:
    """All N rows, at most `rows` at a time: groups of like length together, whole where they fit.

    mask: (N, C), the tokens that are scored; None: all of the completions'. pass_tokens: tokens that take as
    long as another pass does; rows are parted further where that saves more of padding. None: no more passes
    than needed.
    """
    mask = rollout.mask if mask is None else mask
    group_size = rollout.group_size
    longest = rollout.lengths.view(-1, group_size).amax(1)  # (B,)
    by_prompt = torch.tensor([len(ids) for ids in rollout.prompt_ids])
    # Of one length, prompts of one length are together: see `model/attention.py`.
    groups = torch.argsort(longest * (by_prompt.max() + 1) + by_prompt, stable=True)
    order = (groups.unsqueeze(1) * group_size + torch.arange(group_size)).flatten()  # (N,)
    if rows >= group_size:
        rows -= rows % group_size
    chunks = [*order.split(rows)]
    if pass_tokens is not None and rows >= group_size:
        parted = [
            _lengths_apart(lengths.tolist(), pass_tokens // group_size)
            for lengths in longest[groups].split(rows // group_size)
        ]
        chunks = [*order.split([group_size * size for sizes in parted for size in sizes])]
    for chunk in reversed(chunks):  # from the largest on: what it has freed, the others fit into
        prompts, row_to_prompt = torch.unique(chunk // group_size, return_inverse=True)
        width = max(1, int(rollout.lengths[chunk].max()))
        yield MicroBatch(
            rows=chunk,
            prompts=pad_prompts([rollout.prompt_ids[prompt] for prompt in prompts]),
            row_to_prompt=row_to_prompt,
            completion_ids=rollout.completion_ids[chunk, :width],
            scored=mask[chunk, :width].flatten().nonzero().squeeze(1),
        )


def _lengths_apart(longest: list[int], worth: int) -> list[int]:
    """How many of these lengths, in rising order, go through together, so that little of it is padding.

    worth: tokens, of one row a length, that have to be saved by each cut.
    """
    saved = [place * (longest[-1] - longest[place - 1]) for place in range(1, len(longest))]
    if not saved or max(saved) <= worth:
        return [len(longest)]
    place = 1 + saved.index(max(saved))
    return _lengths_apart(longest[:place], worth) + _lengths_apart(longest[place:], worth)


def largest_pass(rollout: Rollout, rows: int, *, pass_tokens: int | None = None) -> Size:
    """That of the most tokens among `micro_batches`: what their memory depends on."""
    sizes = (
        Size(len(batch.rows), batch.completion_ids.shape[1], batch.prompts.ids.shape[1])
        for batch in micro_batches(rollout, rows, pass_tokens=pass_tokens)
    )
    return max(sizes, key=lambda size: positions(size.rows, size.tokens, size.shared, rollout.group_size))


def token_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    temperature: float,
    dtype: torch.dtype,
    entropy: bool = False,
    slope: Slope | None = None,
    per_token: bool = True,
    checkpointing: Checkpointing = "none",
    traced: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (or zeros) of a micro-batch's scored tokens, (K,) each, on the model's device.

    Of the temperature-scaled, untruncated distribution. dtype: what matrix products are computed in. With
    `slope`, see `head_pass`, gradients are added to the parameters' `.grad`; per_token: whether the slope at
    a token depends on its log-prob alone; if not, all are computed first, and the head is multiplied again.
    checkpointing: see `recomputed_layers`. traced: the device whose memory a trace is of.
    """
    device = model.device
    batch, _ = batch.to(device)

    def work() -> tuple[Tensor, HeadPass]:
        with computing_in(dtype, device), torch.set_grad_enabled(slope is not None):
            hidden = completion_hidden(
                model, batch.prompts, batch.row_to_prompt, batch.completion_ids, checkpointing=checkpointing
            )
            head = model.get_output_embeddings()
            scores = partial(
                head_pass, hidden.detach(), head.weight, batch.completion_ids, batch.scored,
                bias=head.bias, temperature=temperature, entropy=entropy, device=traced,
            )  # fmt: skip
            if slope is None or per_token:
                return hidden, scores(slope=slope)
            logp = scores(entropy=False).logp
            slopes = slope(logp, slice(0, len(logp)))
            return hidden, scores(slope=lambda _, part: slopes[part])

    hidden, scored = run_gathered(model, work)
    if scored.hidden_gradient is not None and hidden.requires_grad:
        hidden.backward(scored.hidden_gradient)  # type: ignore[no-untyped-call]
    return scored.logp, scored.entropy


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Matrix products inside are computed in `dtype`, where it is lower than the weights' own."""
    lower = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype=dtype if lower else torch.bfloat16, enabled=lower)


@torch.no_grad()
def score(
    model: PreTrainedModel,
    rollout: Rollout,
    *,
    rows: int,
    temperature: float,
    dtype: torch.dtype,
    pass_tokens: int | None = None,
) -> Tensor:
    """Log-probs (N, C) of a whole rollout without gradients, on the CPU; in parts: see `micro_batches`."""
    exact = torch.promote_types(model.dtype, torch.float32)
    logp = torch.zeros(rollout.completion_ids.shape, dtype=exact, device=model.device)
    for micro in micro_batches(rollout, rows, pass_tokens=pass_tokens):
        batch, moved = micro.to(model.device, {"rows": micro.rows})
        part = batch.padded(token_logprobs(model, batch, temperature=temperature, dtype=dtype)[0])
        logp[moved["rows"], : part.shape[1]] = part.to(exact)
    return logp.cpu()
