"""Log-probs of given tokens without the logits tensor: the vocabulary head, a chunk of tokens at a time.

Logits for a batch are (rows, tokens, vocabulary), usually the largest tensor of a step. Here they
exist for `chunk_tokens` tokens at once, in the forward pass. Gradients are made of them there, where the
loss is known; else they are computed again in the backward pass, for which two numbers per token are kept.

Left out on purpose: heads that are not a plain linear layer (soft-capped logits), and gradients
of the entropy, which is a metric here.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo.model.head import CAST_ROWS, parts
from grpo.model.stand_ins import product_dtype
from grpo.scoring.fused import is_fused
from grpo.scoring.head import Head, tokens_at_once

TokenLoss = Callable[[Tensor], Tensor]
"""A sum over tokens (R, C) of what depends on the log-prob of that token alone."""


def completion_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scored: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    entropy: bool = False,
    loss: TokenLoss | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax((hidden @ weightᵀ + bias) / temperature) at `targets`, and the entropy, in nats.

    hidden: (R, C, D), the states that predict `targets` (R, C). weight: (V, D), bias: (V,). scored: (K,)
    places among the R·C tokens, None: all, so that shapes are known beforehand and fake tensors can trace
    it; elsewhere nothing is computed or read, and the results are 0. Returns (R, C) log-probs with
    gradients to hidden, weight and bias, and (R, C) detached entropies or None.

    The matrix product is taken in autocast's dtype where autocast is on, else in hidden's; from
    the logits on everything is fp32 (float64 for float64), weight gradients are summed in it too:
    where the weight has one already (`.grad`), in that, and autograd is given none.
    A head in lower precision is centred, see `centred_head`.

    chunk_tokens: None: as `tokens_at_once` has it. loss: what the caller is going to call backward on, if
    known, as a function of these log-probs. Gradients are then made while the logits are there, which are
    computed again else: one of the head's four products. device: whose memory a trace is of, if not hidden's.
    """
    if hidden.shape[:-1] != targets.shape or (scored is not None and scored.ndim != 1):
        shapes = [tuple(t.shape) for t in (hidden, targets, scored) if t is not None]
        raise ValueError(f"hidden (R, C, D), targets (R, C) and scored (K,) do not go together: {shapes}.")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0 (usual: 1.0).")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be 1 or more (usual: 256 to 4096).")
    flat = hidden.reshape(-1, hidden.shape[-1])  # (R·C, D)
    dtype, device = product_dtype(hidden), device or hidden.device
    is_fused(device, dtype, traced=device.type != hidden.device.type)  # which chunks depend on
    chunk_tokens = chunk_tokens or tokens_at_once(len(weight), dtype, device.type)
    options = (temperature, chunk_tokens, entropy, dtype, device)
    inputs = (flat, weight, bias, targets, scored)
    apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
    logp, entropies = apply(*inputs, *options, loss)  # keeps nothing where nothing needs a gradient
    return logp.reshape(targets.shape), entropies.reshape(targets.shape) if entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: Tensor | None,
        temperature: float,
        chunk_tokens: int,
        entropy: bool,
        dtype: torch.dtype,
        device: torch.device,
        loss: TokenLoss | None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all tokens (R·C,). Kept: of `rows` the largest logit and log-sum (K, 2);

        or, where the loss is known, the gradients alone.
        """
        exact = torch.promote_types(dtype, torch.float32)
        shape, targets = targets.shape, targets.reshape(-1)
        count = len(hidden) if rows is None else len(rows)
        logp, entropies = hidden.new_zeros(2, len(hidden), dtype=exact)
        scores = hidden.new_empty(count, 4, dtype=exact)
        made = None
        if loss is not None and any(ctx.needs_input_grad[:3]):
            made = _Gradients(ctx.needs_input_grad, hidden, weight, bias, exact)
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(weight, bias, dtype, temperature, min(chunk_tokens, count), device)
            for chunk, part, states in head.chunks(hidden, rows):
                head.score(targets[part], scores[chunk], entropy=entropy)
                logp[part], entropies[part] = scores[chunk, 0], scores[chunk, 1]
                if made is not None and loss is not None:
                    slope = _slope(loss, logp.view(shape)).view(-1)[part]
                    made.add(head, states, scores[chunk, 2:], targets[part], slope, part)
        if made is not None:
            ctx.save_for_backward(*made.all)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, rows, scores[:, 2:].clone())
        ctx.options = (temperature, chunk_tokens, dtype, device, made is not None)
        ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        temperature, chunk_tokens, dtype, device, are_made = ctx.options
        if are_made:
            return (*ctx.saved_tensors, *(None,) * 8)
        hidden, weight, bias, targets, rows, normalizers = ctx.saved_tensors
        made = _Gradients(ctx.needs_input_grad, hidden, weight, bias, normalizers.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(weight, bias, dtype, temperature, min(chunk_tokens, len(normalizers)), device)
            for chunk, part, states in head.chunks(hidden, rows):
                made.add(head, states, normalizers[chunk], targets[part], grad_logp[part], part)
        return (*made.all, *(None,) * 8)


def _slope(loss: TokenLoss, logp: Tensor) -> Tensor:
    """The loss's gradient at log-probs (R, C)."""
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]


class _Gradients:
    """To hidden (R·C, D), weight (V, D) and bias (V,), as far as they are wanted, a chunk after the other."""

    def __init__(
        self, wanted: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, exact: torch.dtype
    ) -> None:
        """exact: what weight gradients are summed in."""
        self._exact = exact
        self._hidden = torch.zeros_like(hidden) if wanted[0] else None
        self._weight = self._bias = None
        self._weight_dtype = weight.dtype
        self._has_one = weight.is_leaf and weight.grad is not None and weight.grad.dtype == exact
        if wanted[1]:
            self._weight = weight.grad if self._has_one else torch.zeros_like(weight, dtype=exact)
        if wanted[2] and bias is not None:
            self._bias, self._bias_dtype = torch.zeros_like(bias, dtype=exact), bias.dtype

    def add(
        self,
        head: Head,
        states: Tensor,
        normalizers: Tensor,
        targets: Tensor,
        slope: Tensor,
        part: slice | Tensor,
    ) -> None:
        """Those of a chunk that `head` has multiplied. slope: (K,), of the loss, to its log-probs."""
        slope = slope.to(self._exact).unsqueeze(1)  # (K, 1)
        grad = head.gradient(normalizers, targets, slope, of_bias=self._bias)
        if self._hidden is not None:
            self._hidden[part] = (grad @ head.weight).to(self._hidden.dtype)
        if self._weight is not None:
            _add_product(self._weight, grad[:, : head.vocabulary], states)

    @property
    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As autograd wants them: none for a weight whose gradient was there already."""
        weight, bias = self._weight, self._bias
        return (
            self._hidden,
            None if weight is None or self._has_one else weight.to(self._weight_dtype),
            None if bias is None else bias.to(self._bias_dtype),
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (M, N) += leftᵀ @ right, for left (T, M) and right (T, N); they may be less exact than it."""
    if total.dtype == right.dtype:
        total.addmm_(left.T, right)
        return
    if _adds_in(total.dtype, right.dtype, total.device):
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
        return
    for rows in parts(len(total), CAST_ROWS, total):
        total[rows] += left[:, rows].T @ right


@cache
def _adds_in(exact: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product of numbers in `dtype` can be added to ones that are more exact; tried once."""
    if device.type != "cuda":
        return False
    ones, total = torch.ones(8, 8, dtype=dtype, device=device), torch.ones(8, 8, dtype=exact, device=device)
    try:
        torch.addmm(total, ones.T, ones, out_dtype=exact, out=total)
        works = bool((total == 9).all())
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        works, reason = False, str(error).splitlines()[0]
    else:
        reason = "they come out wrong"
    if not works:
        logger.info("products are not added to a head's gradient at once, slower: {}", reason)
    return works
