"""Do claimed batch sizes follow from one another? "69 at 85 %, 64 at 80 %" on a card of known size.

A batch holds the budget's fixed bytes and as many bytes a sample as each other's; a claimed size is the
largest that fits, rounded down. Each claim then says how large a sample is, and so what another share
of the card would hold.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from grpo.config import SettingsError
from grpo.memory.budget import GB


@dataclass(frozen=True)
class Claim:
    """`batch_size` is said to be the largest in `share` of the card."""

    batch_size: int
    share: float

    def __str__(self) -> str:
        return f"{self.batch_size} at {100 * self.share:g} %"


def parse_claim(text: str) -> Claim:
    """69@85% or 69@0.85. SettingsError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*@\s*(\d*\.?\d+)\s*(%?)\s*", text)
    claim = Claim(int(match[1]), float(match[2]) / (100 if match[3] else 1)) if match else Claim(0, 0)
    if claim.batch_size < 1 or not 0 < claim.share <= 1:
        raise SettingsError(
            f"claim is {text!r}: write it like 69@85%, a batch of at least 1 at a share of up to 100 %."
        )
    return claim


@dataclass(frozen=True)
class Verdict:
    """Whether a common size of a sample gives all claims, and the fixed bytes for which one would."""

    agree: bool
    fixed_range: tuple[float, float] | None
    """From, up to (not including), in bytes; None: for none at all."""
    sentences: tuple[str, ...]


def check_claims(claims: Sequence[Claim], total_bytes: float, fixed_bytes: float) -> Verdict:
    """At least two claims about a card of `total_bytes` that holds `fixed_bytes` whatever the batch."""
    sentences = [
        sentence
        for claim in claims
        for sentence in _consequences(claim, claims, total_bytes, fixed_bytes)
    ]  # fmt: skip
    allowed = fixed_range(claims, total_bytes)
    agree = allowed is not None and allowed[0] <= fixed_bytes < allowed[1]
    if agree:
        sentences.append("They follow from one another, up to rounding down.")
        return Verdict(agree, allowed, tuple(sentences))
    sentences.append("They do not follow from one another.")
    if allowed is None:
        sentences.append("No fixed bytes would make them.")
    else:
        low = f"at least {allowed[0] / GB:.2f} and " if allowed[0] else ""
        sentences.append(
            f"They would with {low}less than {allowed[1] / GB:.2f} GB fixed; these lines have "
            f"{fixed_bytes / GB:.2f}."
        )
        sentences += _in_proportion(claims) if allowed[0] <= 0 else []
    return Verdict(agree, allowed, tuple(sentences))


def _consequences(claim: Claim, claims: Sequence[Claim], total_bytes: float, fixed_bytes: float) -> list[str]:
    """What one claim says about the shares of the others."""
    room = claim.share * total_bytes - fixed_bytes
    if room <= 0:
        needed = f"{fixed_bytes / GB:.2f} GB are fixed, of {claim.share * total_bytes / GB:.2f}"
        return [f"{claim}: cannot be, as {needed}."]
    sample = room / claim.batch_size
    others = [
        f"{max(0, int((other.share * total_bytes - fixed_bytes) / sample))} fit at {100 * other.share:g} %, "
        f"claimed are {other.batch_size}"
        for other in claims
        if other != claim
    ]
    return [f"{claim}: {sample / GB:.3f} GB a sample beside the fixed lines, so {'; '.join(others)}."]


def _in_proportion(claims: Sequence[Claim]) -> list[str]:
    """With nothing fixed the batch grows as the share does, which is how such claims may have come about."""
    first, *rest = claims
    scaled = [
        f"{first.batch_size} × {100 * other.share:g} / {100 * first.share:g} = "
        f"{first.batch_size * other.share / first.share:.2f}"
        for other in rest
    ]
    return [f"As if nothing were fixed, in proportion to the share: {'; '.join(scaled)}, rounded down."]


def fixed_range(claims: Sequence[Claim], total_bytes: float) -> tuple[float, float] | None:
    """The fixed bytes F for which one size of a sample gives every claim, rounded down.

    Claim n at u bytes allows sizes in ((u - F)/(n + 1), (u - F)/n]; intervals that meet in pairs all
    meet. For a pair: (u - F)/(n + 1) < (v - F)/m, which is F (n + 1 - m) < (n + 1) v - m u.
    """
    low, high = 0.0, min(claim.share for claim in claims) * total_bytes
    for one, other in permutations(claims, 2):
        factor = one.batch_size + 1 - other.batch_size
        most = (
            (one.batch_size + 1) * other.share - other.batch_size * one.share
        ) * total_bytes  # fmt: skip
        if factor > 0:
            high = min(high, most / factor)
        elif factor < 0:
            low = max(low, most / factor)
        elif most <= 0:
            return None
    return (low, high) if low < high else None
