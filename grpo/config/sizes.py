"""Sizes as people write them: 1 GB is 2**30 bytes throughout."""

import re

from grpo.errors import UserError

GB = 2**30
_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": GB, "TB": 2**40}


def parse_size(text: str) -> int:
    """Bytes of "24GB", "512MB", "1.5GiB" or a plain number of bytes, a MB at least. ValueError for others."""
    if not is_size(text):
        raise UserError(f"{text!r} is no size: write it like 24GB or 512MB.")
    return _bytes(text)


def is_size(text: str) -> bool:
    return _bytes(text) > 0


def _bytes(text: str) -> int:
    """Parses a size; 0 for what is none."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[f"{match[2].upper()}B" if match[2] else ""]) if match else 0
    without_unit = match is not None and not (match[2] or match[3])
    return 0 if without_unit and size < 2**20 else size  # 24 is hardly meant to be bytes
