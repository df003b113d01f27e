"""Make docs/settings.md from the settings' own texts: `python scripts/settings_page.py`."""

from pathlib import Path

from grpo.config.help import settings_page

if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "settings.md").write_text(settings_page(), encoding="utf-8")
