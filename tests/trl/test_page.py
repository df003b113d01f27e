"""docs/trl.md: its example runs as it stands."""

import re

import pytest
from commands import ROOT

pytestmark = pytest.mark.usefixtures("own_accelerator")


def test_the_example(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "trl.md").read_text()
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example.py", "exec"), {"__name__": "__main__"})
    assert "Memory planned after the first step" in capsys.readouterr().out
    assert (tmp_path / "brief" / "checkpoint-3").is_dir()
