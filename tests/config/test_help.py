"""The help of the command line, and the page of settings that is made from it."""

from collections import Counter

from commands import ROOT

from grpo.config import Config, to_flat
from grpo.config.help import FIRST, help_text, sections, settings_page


def test_every_setting_is_in_one_section_and_says_what_it_is():
    found = [each for members in sections().values() for each in members]
    assert Counter(each.name for each in found) == Counter(list(to_flat(Config())))
    assert all(len(each.text) > 10 for each in found)
    assert 10 <= len(FIRST) <= 15


def test_the_help_says_first_what_people_need_first():
    text = help_text("grpo-lean train")
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert shown[: len(FIRST)] == [f"--{name.replace('_', '-')}" for name in FIRST]
    assert len(shown) == len(to_flat(Config()))
    assert "[auto; of auto, fp32, bf16, fp64]" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_the_page_is_as_it_is_made():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings_page(), "python scripts/settings_page.py"
