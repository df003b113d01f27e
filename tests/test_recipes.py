"""docs/recipes: what a person types, on models that are tiny and rows that are few."""

import json
import re
import shlex

import pytest
from commands import ROOT, run
from transformers import AutoTokenizer, GenerationConfig

from grpo.evaluate import Evaluation
from grpo.run.tracking import read_lines

RECIPES = ROOT / "docs" / "recipes"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.usefixtures("made_up_plans")
def test_letters_are_learned_to_be_sorted(tmp_path, monkeypatch, capsys):
    """In a tenth of the steps that the page takes."""
    page = (RECIPES / "letters.md").read_text()
    code = re.search(r"<!-- recipe -->\n```python\n(.*?)```\n<!-- end of recipe -->", page, re.DOTALL)[1]
    assert "steps=500," in code and "eval_interval=50," in code
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    shorter = code.replace("steps=500,", "steps=50,").replace("eval_interval=50,", "eval_interval=25,")
    exec(compile(shorter, "letters.py", "exec"), names)
    held_out = [line["eval_reward"] for line in read_lines(tmp_path / "runs/letters/metrics.jsonl")
                if "eval_reward" in line]  # fmt: skip
    assert len(held_out) == 3 and held_out[0] == 0 and held_out[2] > held_out[1] > 0.2
    assert re.fullmatch(r"50 [a-h]{4}> [a-h]*>?.*\n", capsys.readouterr().out)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory, model_folders):
    """A tiny Qwen that chats, with two ends as Qwen has them."""
    folder = tmp_path_factory.mktemp("chat") / "qwen"
    folder.mkdir()
    for file in model_folders["qwen"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[0, 5]).save_pretrained(folder)
    return folder


def typed(page: str, command: str) -> list[str]:
    """The words of a command in a page's indented block, as the shell makes them."""
    text = re.search(rf"^    grpo-lean {command} (.*?[^\\])$", page, re.DOTALL | re.MULTILINE)[1]
    return shlex.split(text.replace("\\\n", " "))


def with_changes(words: list[str], changes: dict[str, object]) -> list[object]:
    """The same with other values of some flags, which have to be there."""
    changed: list[object] = list(words)
    for flag, value in changes.items():
        changed[changed.index(flag) + 1] = value
    return changed


def test_word_problems_are_trained_on_and_evaluated_as_the_page_says(tmp_path, chat_model):
    page = (RECIPES / "gsm8k.md").read_text()
    files = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    for name, content in files:
        (tmp_path / name).write_text(content)
    for part in ("train", "test"):
        rows = [{"question": f"{n} + {n}?", "answer": f"It is\n#### {2 * n:,}"} for n in range(20)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = typed(page, "train")
    assert words[words.index("--system-prompt") + 1] == "$(cat system.txt)"
    small = {
        "--model": chat_model, "--prompts": "train.jsonl", "--batch-size": 16, "--max-new-tokens": 12,
        "--steps": 2, "--eval-interval": 2, "--system-prompt": (tmp_path / "system.txt").read_text().strip(),
    }  # fmt: skip
    done = run("train_lean.py", *with_changes(words, small), "--heldout-share", 0.2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "completions end at <|endoftext|> or" in " ".join(done.stderr.split())
    folder = tmp_path / "runs" / "gsm8k"
    metrics = [line for line in read_lines(folder / "metrics.jsonl") if "reward" in line]
    assert {"rewards/right/mean", "rewards/layout/mean", "answered"} <= metrics[-1].keys()
    (record, *_) = read_lines(folder / "completions.jsonl")
    assert record["messages"][0]["role"] == "system" and "+" in record["messages"][1]["content"]
    assert record["prompt"].endswith("<|im_start|>assistant\n")
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template == CHAT
    words = typed(page, "evaluate")
    words[0] = str(chat_model)
    done = run("scripts/evaluate.py", *with_changes(words, {"--prompts": "test.jsonl"}), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rewards/right/mean") == 2 and " 20 │" in done.stdout  # greedy and sampled
    one = run("scripts/evaluate.py", *words[1:2], "--json", "one.json", cwd=tmp_path)  # held out of the run's
    assert one.returncode == 0, one.stderr
    assert "sampled/rewards/right/mean" in Evaluation.load(tmp_path / "one.json").scores


def test_the_rewards_of_the_page_judge_as_it_says():
    page = (RECIPES / "gsm8k.md").read_text()
    code = re.search(r"^`gsm8k_rewards.py`:\n\n```python\n(.*?)```", page, re.DOTALL | re.MULTILINE)[1]
    names: dict = {}
    exec(code, names)
    said = ["2 + 2 = 4\n#### 4", "#### 5", "\n#### $1,004.50", "4", "#### 3, no:\n#### 4\nDone."]
    talks = [[{"role": "assistant", "content": text}] for text in said]
    answers = ["It is\n#### 4"] * 2 + ["#### 1,004.5"] + ["#### 4"] * 2
    logged = {}
    assert names["right"](talks, answers, logged.__setitem__) == [1, 0, 1, 0, 1]
    assert logged == {"answered": 0.8}
    assert names["layout"](talks) == [1, 0, 0, 0, 0]
