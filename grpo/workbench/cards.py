"""Common cards: what they are sold with, and what of it CUDA offers.

Usable bytes are estimates to plan by, not measurements; they are mostly one per cent below what PyTorch
reports. Left out: cards below 8 GB, and the many brands of one chip.
"""

import difflib
import re
from dataclasses import dataclass

from grpo.config import SettingsError
from grpo.config.sizes import GB, parse_size
from grpo.logs.tables import Row

ECC_SHARE = 15 / 16
"""The share of GDDR memory that error correction leaves. nvidia-smi on a T4: 15360 MiB of 16 GB, A10: 23028
of 24 GB, L4: 23034 of 24 GB, L40S: 46068 of 48 GB. HBM keeps its check bits elsewhere."""
MIN_START = 2
"""Letters at least that stand for every card whose name starts with them."""


@dataclass(frozen=True)
class Card:
    """`sold_gb` of 2**30 bytes; `bf16`: whether it multiplies in it natively."""

    name: str
    sold_gb: float
    bf16: bool = True
    gddr_ecc: bool = False
    """Error correction that is on as delivered and takes its bits from the memory."""

    @property
    def usable_bytes(self) -> int:
        """The bytes that a process can ask CUDA for on an idle card."""
        from grpo.memory.budget import card_memory  # which loads torch

        share = ECC_SHARE if self.gddr_ecc else 1.0
        return card_memory(int(share * self.sold_gb * GB)).total_bytes


CARDS = {
    card.name: card
    for card in (
        Card("rtx3070", 8),
        Card("rtx4060", 8),
        Card("rtx3080", 10),
        Card("rtx3060", 12),
        Card("rtx4070", 12),
        Card("t4", 16, bf16=False, gddr_ecc=True),
        Card("v100-16gb", 16, bf16=False),
        Card("rtx4060ti-16gb", 16),
        Card("rtx4080", 16),
        Card("rtx5080", 16),
        Card("rtx3090", 24),
        Card("rtx4090", 24),
        Card("a10", 24, gddr_ecc=True),
        Card("l4", 24, gddr_ecc=True),
        Card("v100-32gb", 32, bf16=False),
        Card("rtx5090", 32),
        Card("a100-40gb", 40),
        Card("a40", 48, gddr_ecc=True),
        Card("l40s", 48, gddr_ecc=True),
        Card("a6000", 48),
        Card("rtx6000-ada", 48),
        Card("a100-80gb", 80),
        Card("h100", 80),
        Card("rtx6000-pro", 96),
        Card("h200", 141),
        Card("b200", 180),
        Card("mi300x", 192),
    )
}


def find_card(name: str | None, sold: str | None = None) -> Card | None:
    """The card people mean: capitals, spaces and dashes do not matter. None if neither is given.

    sold: the size of a card that is not known here, such as 20GB. SettingsError suggests near names.
    """
    if sold is not None:
        return Card(_plain(sold), parse_size(sold) / GB)
    if name is None:
        return None
    plain, wanted = {_plain(known): card for known, card in CARDS.items()}, _plain(name)
    if wanted in plain:
        return plain[wanted]
    starting = [known for known in plain if len(wanted) >= MIN_START and known.startswith(wanted)]
    near = starting or difflib.get_close_matches(wanted, plain, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(plain[known].name for known in near)}? " if near else ""
    raise SettingsError(
        f"gpu is {name!r}, which is no card known here. {hint}"
        "Without --gpu all are listed; --gpu-memory 24GB stands for any other."
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def cards_rows() -> list[Row]:
    """Every card, smallest first."""
    return [
        {
            "--gpu": card.name,
            "sold, GB": f"{card.sold_gb:g}",
            "usable, GB": f"{card.usable_bytes / GB:.2f}",
            "native bf16": "yes" if card.bf16 else "no",
        }
        for card in CARDS.values()
    ]
