"""The vocabulary head of a chunk of tokens: its products, and what is done with them number by number.

Shared by all chunks there are one (chunk_tokens, V) buffer in the dtype of products, and in fp32 one for what
is made of them, or two where products are in lower precision; and, where the head is computed in another
dtype than it is stored in or in lower precision, one (V, D) copy. On an accelerator the vocabulary of that
copy and of the buffer is padded to a multiple of 64: products of an odd vocabulary, such as GPT-2's 50,257,
cannot use a card's fast kernels, as their rows begin at odd addresses.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo.model.head import centred_head, parts
from grpo.scoring import fused

HOST_TOKENS, HOST_BYTES = 2**10, 2**27
"""Of a chunk on a CPU, at most."""
LAUNCHED_TOKENS, LAUNCHED_BYTES = 2**14, 2**28
"""Of a chunk at most on an accelerator, where its kernels have to be worth launching."""
_MULTIPLE = 64
"""Of a padded vocabulary: rows of products in 16 bits then begin at multiples of 128 bytes."""


def tokens_at_once(vocabulary: int, dtype: torch.dtype, device_type: str) -> int:
    """Tokens of a chunk, whose products in `dtype`, and what is made of them, exist at once."""
    most, num_bytes = (HOST_TOKENS, HOST_BYTES) if device_type == "cpu" else (LAUNCHED_TOKENS, LAUNCHED_BYTES)
    return max(1, min(most, num_bytes // (vocabulary * logit_bytes(dtype, device_type))))


def logit_bytes(dtype: torch.dtype, device_type: str) -> int:
    """Of one logit of a chunk: its product, and unless kernels are fused what is made of it in fp32."""
    if fused.was_fused(device_type, dtype):
        return dtype.itemsize
    return dtype.itemsize + (2 if dtype.itemsize < 4 else 1) * max(4, dtype.itemsize)


def vocabulary_padding(vocabulary: int, dtype: torch.dtype, device_type: str) -> int:
    """Rows of zeros that a head gets where it is copied in any case: in lower precision."""
    return -vocabulary % _MULTIPLE if dtype.itemsize < 4 and device_type != "cpu" else 0


class Head:
    """The vocabulary head in the dtype of its products, a chunk's products, and room for their logits.

    All chunks share their tensors: on a CPU fresh pages would take longer than what is written on them.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        temperature: float,
        tokens: int,
        device: torch.device,
    ) -> None:
        """tokens: of a chunk, at most. device: that it runs on, or whose memory is traced."""
        self.vocabulary = len(weight)
        padding = vocabulary_padding(len(weight), dtype, device.type)
        cast = centred_head if dtype.itemsize < 4 else Tensor.to
        self.weight = _padded(cast(weight, dtype), padding)  # (V + padding, D)
        self._bias = None if bias is None else _padded(cast(bias, dtype), padding)
        self._temperature, self._chunk_tokens = temperature, max(1, tokens)
        self._room_for_products = weight.new_empty(tokens, len(weight) + padding, dtype=dtype)
        self._products = self._room_for_products
        """(K, V + padding): 0 beyond the vocabulary, as products and as gradients."""
        self._are_shifted = False
        """Whether products are logits by now, less the largest of each token."""
        self._is_fused = fused.is_fused(device, dtype, traced=weight.device.type != device.type)
        self._room: Tensor | None = None
        self._room_for_logits = None if dtype.itemsize >= 4 or self._is_fused else self._new_room()

    def chunks(self, hidden: Tensor, rows: Tensor | None) -> Iterator[tuple[slice, slice | Tensor, Tensor]]:
        """Of hidden (R·C, D), or some of its rows (K,), a chunk after the other, which is multiplied.

        Its place among those rows, its place in hidden, and its states in the dtype of products.
        """
        count = len(hidden) if rows is None else len(rows)
        for chunk in parts(count, self._chunk_tokens, hidden):
            part = chunk if rows is None else rows[chunk]
            states = hidden[part].to(self.weight.dtype)
            self.multiply(states)
            yield chunk, part, states

    @property
    def _numbers(self) -> Tensor:
        """The products (K, V) without the padding."""
        return self._products[:, : self.vocabulary]

    def multiply(self, states: Tensor) -> None:
        """states (K, D) @ weightᵀ + bias: the products (K, V) that all else is about."""
        self._products, self._are_shifted = self._room_for_products[: len(states)], False
        if self._bias is None:
            torch.mm(states, self.weight.T, out=self._products)
        else:
            torch.addmm(self._bias, states, self.weight.T, out=self._products)

    def score(self, targets: Tensor, scores: Tensor, *, entropy: bool) -> None:
        """Write log-prob, entropy, largest logit and log-sum to scores (K, 4).

        entropy: whether it is asked for; where it would take time of its own it is 0 else.
        """
        if self._is_fused:
            scores.copy_(fused.scores(self._numbers, targets, self._temperature))
            return
        if self._room is None:
            self._room = self._new_room()
        logits = self._logits()
        scores.copy_(_score(logits, self._room[: len(logits)], targets, entropy))
        self._are_shifted = self._room_for_logits is None

    def gradient(
        self, normalizers: Tensor, targets: Tensor, slope: Tensor, *, of_bias: Tensor | None
    ) -> Tensor:
        """What slope (K, 1) to log-probs is to products, in their place: (K, V + padding), 0 in the padding.

        Added up in of_bias. normalizers: largest logits and log-sums (K, 2).
        """
        grad, slope = self._numbers, slope / self._temperature
        if self._is_fused:
            fused.to_gradient(grad, normalizers, targets, slope, self._temperature)
            if of_bias is not None:
                of_bias += grad.sum(dim=0, dtype=of_bias.dtype)
            return self._products
        logits = self._logits()
        largest = 0 if self._are_shifted else normalizers[:, :1]
        _logits_gradient(logits, largest, normalizers[:, 1:], targets, slope)
        if of_bias is not None:
            of_bias += logits.sum(dim=0)
        if logits.dtype != grad.dtype:
            grad.copy_(logits)
        return self._products

    def _new_room(self) -> Tensor:
        """For a chunk's logits (K, V) in fp32, or float64."""
        exact = torch.promote_types(self._products.dtype, torch.float32)
        return self._products.new_empty(len(self._room_for_products), self.vocabulary, dtype=exact)

    def _logits(self) -> Tensor:
        """The chunk's (K, V) in fp32 or float64, to be overwritten.

        They are the products themselves where those are as exact: once scored, less the largest.
        """
        logits = self._numbers
        if self._room_for_logits is not None:
            logits = self._room_for_logits[: len(logits)].copy_(logits)
        if self._temperature != 1 and not self._are_shifted:
            logits.div_(self._temperature)
        return logits


def _padded(values: Tensor, padding: int) -> Tensor:
    """With so many rows of zeros behind."""
    return torch.cat([values, values.new_zeros(padding, *values.shape[1:])]) if padding else values


def _score(logits: Tensor, room: Tensor, targets: Tensor, entropy: bool) -> Tensor:
    """Log-prob, entropy (or 0), largest logit and log-sum of each token: (k, 4).

    Overwrites `logits` (k, V) and `room` (k, V).
    """
    # Shifted by the largest, as log_softmax does: GPT-2's logits lie near -100, where fp32 is coarse.
    largest = logits.amax(dim=1, keepdim=True)
    probs = torch.exp(logits.sub_(largest), out=room)
    total = probs.sum(dim=1, keepdim=True)
    log_total = total.log()
    logp = logits.gather(1, targets.unsqueeze(1)) - log_total
    entropies = torch.zeros_like(logp)
    if entropy:  # a token that cannot occur (logit -inf) adds 0, not 0 * -inf
        lowest = torch.finfo(logits.dtype).min
        entropies = log_total - probs.mul_(logits.clamp_(min=lowest)).sum(dim=1, keepdim=True) / total
    return torch.cat([logp, entropies, largest, log_total], dim=1)


def _logits_gradient(
    logits: Tensor, largest: Tensor | float, log_total: Tensor, targets: Tensor, slope: Tensor
) -> None:
    """slope * (one-hot(targets) - softmax(logits)), (k, V), in place of `logits`."""
    probs = logits.sub_(largest).sub_(log_total).exp_()
    probs.mul_(-slope).scatter_add_(1, targets.unsqueeze(1), slope)
