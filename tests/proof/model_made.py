"""Positions and a model as the bundled ones were made, small."""

from commands import fresh
from prompt_lines import parse_line
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_positions_are_labelled_and_a_model_is_pretrained_on_them(tmp_path):
    lines = tmp_path / "policy.txt"
    words = ("--policy", 40, "--environment", 2, "--depth", 2, "--output", lines)
    done = fresh("scripts/label_positions.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len([parse_line(line) for line in lines.read_text().splitlines()]) == 42
    lines.write_text("\n".join(lines.read_text().splitlines()[:40]))
    done = fresh(
        "scripts/pretrain_tiny.py", "--policy-lines", lines, "--output", tmp_path / "model", "--steps", 2,
        "--batch-tokens", 512, "--layers", 1, "--width", 64, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.n_layer == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([0]) == "<|endoftext|>"
