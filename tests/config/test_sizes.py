"""Sizes as people write them."""

import pytest

from grpo.config.sizes import SizeError, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 2**30), ("24 gib", 24 * 2**30), ("1.5G", 3 * 2**29), ("512MB", 2**29), (".5k", 512),
     ("2TB", 2**41), ("1048576", 2**20), (" 7B ", 7)],
)  # fmt: skip
def test_a_size_is_read_as_people_write_it(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "0", "0GB", "0.4", "-1GB", "24 G B", "24XB", "1e9", "nan", "24GBs", "24"]
)
def test_what_is_no_size_says_how_to_write_one(text: str):
    with pytest.raises(SizeError, match="is no size: write it like 24GB or 512MB"):
        parse_size(text)
