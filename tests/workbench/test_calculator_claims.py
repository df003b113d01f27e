"""Whether claimed batch sizes follow from one another, worked out by hand."""

import pytest

from grpo.config import SettingsError
from grpo.memory.budget import GB
from grpo.workbench.calculator.claims import Claim, check_claims, fixed_range, parse_claim


def claims(*texts):
    return [parse_claim(text) for text in texts]


def test_claims_are_read_as_people_write_them():
    assert parse_claim("69@85%") == parse_claim(" 69 @ 0.85") == Claim(69, 0.85)
    assert str(parse_claim("69@0.85")) == "69 at 85 %"
    for wrong in ("69", "69@", "0@85%", "69@185%", "69@0", "-3@80%"):
        with pytest.raises(SettingsError, match=r"claim is .*: write it like 69@85%"):
            parse_claim(wrong)


def test_69_at_85_and_64_at_80_do_not_follow_from_one_another_with_38_of_80_fixed():
    """(68 - 38)/69 = 0.4348 a sample: 26 / 0.4348 = 59.8. (64 - 38)/64 = 0.40625: 30 / 0.40625 = 73.8."""
    verdict = check_claims(claims("69@85%", "64@80%"), 80 * GB, 38 * GB)
    assert not verdict.agree
    first, second, conclusion, range_of_fixed, proportion = verdict.sentences
    assert "0.435 GB a sample" in first and "so 59 fit at 80 %, claimed are 64" in first
    assert "0.406 GB a sample" in second and "so 73 fit at 85 %, claimed are 69" in second
    assert conclusion == "They do not follow from one another."
    assert "less than 21.33 GB fixed; these lines have 38.00" in range_of_fixed
    assert "69 × 80 / 85 = 64.94" in proportion


def test_the_fixed_bytes_that_claims_allow():
    """64 (68 - F) < 70 (64 - F): F < 128/6. Just inside, some size of a sample gives both; outside none."""
    low, high = fixed_range(claims("69@85%", "64@80%"), 80)
    assert (low, high) == (0, pytest.approx(128 / 6))
    for fixed, expected in ((0, True), (21.2, True), (21.4, False), (60, False)):
        sizes = [n / 20000 for n in range(1, 20001)]
        both = any(int((68 - fixed) / s) == 69 and int((64 - fixed) / s) == 64 for s in sizes)
        assert both == check_claims(claims("69@85%", "64@80%"), 80, fixed).agree == expected


def test_claims_that_need_something_fixed_and_claims_that_nothing_would_make():
    """At 40 % 10 and at 80 % 30 fit with 20 fixed in 100; the same 10 at 40 and at 80 % never do."""
    low, high = fixed_range(claims("10@40%", "30@80%"), 100)
    assert 0 < low < 20 < high
    assert check_claims(claims("10@40%", "30@80%"), 100, 20).agree
    assert not check_claims(claims("10@40%", "30@80%"), 100, 0).agree
    assert fixed_range(claims("20@40%", "10@80%"), 100) is None
    assert "No fixed bytes would" in check_claims(claims("20@40%", "10@80%"), 100, 0).sentences[-1]


def test_a_claim_in_less_than_is_fixed_cannot_be():
    verdict = check_claims(claims("5@30%", "64@80%"), 80 * GB, 38 * GB)
    assert "5 at 30 %: cannot be, as 38.00 GB are fixed, of 24.00." in verdict.sentences
