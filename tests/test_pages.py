"""Commands that pages tell people to type run as they stand, and things that pages name are there."""

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
import torch
from commands import ROOT, Ended, run
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import grpo
from grpo import Trainer
from grpo.evaluate import Evaluation
from grpo.logs.tracking import read_lines
from grpo.run.checkpoint import find_damage

DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        ROOT / "README.md",
        *sorted(DOCS.rglob("*.md")),
        ROOT / "grpo" / "assets" / "rook-tiny" / "README.md",
    )
}
README, PYTHON, GSM8K = (PAGES[name] for name in ("README.md", "docs/python.md", "docs/recipes/gsm8k.md"))


def code(page: str, name: str) -> str:
    """Returns the text behind `<!-- name -->`."""
    return re.search(rf"<!-- {name} -->\n```python\n(.*?)```", page, re.DOTALL)[1]


def files(page: str) -> dict[str, str]:
    """Returns the files that a page has people write: "`name`:", and the content."""
    return dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL | re.MULTILINE))


def succeeded(folder: Path, *words: object) -> Ended:
    """A command that was run there."""
    done = run(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def cells(text: str, start: str) -> dict[str, list[str]]:
    """Rows of the first table after `start`, by their first cell."""
    rows: dict[str, list[str]] = {}
    for line in text[text.index(start) :].splitlines()[1:]:
        found = [cell.strip() for cell in re.split("[│|┃]", line)[1:-1]]
        if rows and not re.match(r"\s*[│├└|]", line):
            return rows
        if found and re.search(r"\d", "".join(found[1:])):
            rows[found[0]] = found[1:]
    return rows


def anchors(page: str) -> list[str]:
    """Returns GitHub's anchors of a page's headings: lower case, without punctuation, a hyphen for a
    space."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_lead_somewhere_and_every_picture_is_shown():
    shown = set()
    for page, text in PAGES.items():
        folder = (ROOT / page).parent
        for link in re.findall(r"\]\(([^)]+)\)", text):
            name, _, anchor = link.partition("#")
            target = folder / name if name else ROOT / page
            assert "://" in link or target.exists(), (page, link)
            assert not anchor or "://" in link or anchor in anchors(target.read_text()), (page, link)
        shown |= {(folder / name).resolve() for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)}
    assert {path.resolve() for path in (DOCS / "pictures").iterdir()} == shown


NOT_OURS = {
    "file.py",
    "path/to/file.py",
    "rewards.py",
    "notes.md",
    "letters.py",
    "gsm8k_rewards.py",
    "tests/test_grpo_trainer.py",
    "c10/cuda/CUDACachingAllocator.cpp",  # of TRL and of torch
}
PAST = {
    "benchmark_kernels.py",
    "benchmark_processes.py",
    "benchmark_recovery.py",
    "benchmark_signal.py",
    "benchmark_trl.py",
    "label_positions.py",
    "pretrain_tiny.py",
}
"""Scripts that pages name as being in the repository up to a commit."""
FOLDERS = "grpo", "rewards", "scripts", "tests", "docs"


def named_files() -> Iterator[tuple[str, str]]:
    """(who names it, a file): on pages what is in code, or is a test or a page; in docstrings all."""
    file, ours = r"[\w./-]*\w\.(?:md|py|sh|toml|cpp)\b", rf"(?:{'|'.join(FOLDERS)})/[\w./-]*\w"
    for page, text in PAGES.items():
        in_code = re.findall(rf"(?<=`){file}(?=[:`])|(?<=`){ours}(?=`)", text)
        yield from ((page, name) for name in in_code + re.findall(r"\b[\w/-]+/\w+\.(?:md|py)\b", text))
    for path in (path for folder in FOLDERS[:3] for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
                yield from ((path.name, name) for name in re.findall(file, node.value.value))


def test_what_is_named_is_there():
    """Files by their path from the top, or by the end of it; and what the package offers."""
    known = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {*ROOT.iterdir()}
    ends = {"/".join(path.parts[-n:]) for path in known for n in range(1, 1 + len(path.parts))}
    named = {(where, name.strip("./")) for where, name in named_files() if name not in NOT_OURS}
    lost = {(where, name) for where, name in named if name not in ends}
    lost = {(where, name) for where, name in lost if name.removeprefix("scripts/") not in PAST}
    assert len(named) > 80 and not lost
    assert all(getattr(grpo, name) for name in grpo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = grpo.Trainr


def test_what_is_said_of_models_is_what_the_page_of_models_found():
    """README.md's numbers are the page's, and a kind stands there once, under a heading that counts it."""
    page = PAGES["docs/models.md"]
    listed, made, trains = map(
        int, re.search(r"Of (\d+) kinds.* lists, (\d+) .*?(\d+) of", page, re.S).groups()
    )
    assert f"[{trains} of the {made} kinds that were tried](docs/models.md)" in PAGES["README.md"]
    fast, slower, refused, absent = (
        int(re.search(rf"^## {title} \((\d+)\)$", page, re.M).group(1))
        for title in ("The fast way", "Slower ways", "Refused", "Not made here")
    )
    assert (fast + slower, fast + slower + refused) == (trains, made) and made + absent <= listed
    tables = page.partition("## Slower")[2].partition("How fast")[0], page.partition("## Refused")[2]
    rows = [row for table in tables for row in re.findall(r"^\| .* \| ([^|]+) \|$", table, re.M)]
    kinds = [kind for row in rows if row != "kinds" for kind in row.split(", ")]
    assert len(set(kinds)) == len(kinds) == slower + refused
    assert any("qwen3_5_text" in row for row in rows)


# ------------------------------------------------------------------------------ examples run as they stand

# In a tenth of the steps that the page takes.
LETTERS = PAGES["docs/recipes/letters.md"].replace("eval_interval=50,", "eval_interval=25,")
EXAMPLES = {
    "run": (PYTHON, r"2 0\.\d+ '.*'\nthe model is in \S+/runs/[\d-]+/model\n"),
    "loss": (PYTHON, r"gradient of \(21,\)\n"),
    "fit": (PYTHON, r"1024 rows at once\n"),
    "leaks": (PYTHON, r"LEAK in 40 steps\n(.*\n)+  held: tensors .*\n"),
    "example": (PAGES["docs/trl.md"], r"Memory planned after the first step(.*\n)+"),
    "recipe": (LETTERS.replace("steps=500,", "steps=50,"), r"\A50 [a-h]{4}> [a-h]*>?.*\n"),
}
"""By their marks: the page, and the last lines that they print."""


@pytest.mark.usefixtures("made_up_plans", "frozen", "own_accelerator")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_as_they_stand(name, tmp_path, monkeypatch, capsys):
    page, last_lines = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    exec(compile(code(page, name), "example.py", "exec"), {"__name__": "__main__"})
    assert re.search(last_lines + r"\Z", capsys.readouterr().out)
    assert name != "example" or (tmp_path / "brief" / "checkpoint-3").is_dir()
    if name == "recipe":  # letters are learned to be sorted
        lines = read_lines(tmp_path / "runs/letters/metrics.jsonl")
        held_out = [line["eval_reward"] for line in lines if "eval_reward" in line]
        assert len(held_out) == 3 and held_out[0] == 0 and held_out[2] > held_out[1] > 0.2


def test_every_example_has_its_test_and_the_readme_no_more_than_180_lines():
    assert len(README.splitlines()) <= 180
    assert PYTHON.count("```python") == sum(page is PYTHON for page, _ in EXAMPLES.values())
    memory = code(PYTHON, "fit")
    assert "import grpo" not in memory and memory.count("from grpo") == memory.count("from grpo.memory") == 1


def test_the_readmes_plan_for_124_million_parameters_in_8_gb(tmp_path):
    words = ("--dry-run", "--device-memory", "8GB", "--batch-size", 512)
    done = run("train_lean.py", *words, cwd=tmp_path, COLUMNS="120", HF_HUB_OFFLINE="1")
    said = done.stdout + done.stderr
    start = "Memory planned; budget 6.66 GB"
    printed, shown = cells(said, start), cells(README, start)
    assert printed == shown and len(shown) > 12


def test_the_example_of_an_own_task_runs(tmp_path):
    example = README[README.index("<!-- example -->") : README.index("<!-- end of example -->")]
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", example, re.DOTALL))
    (tmp_path / "my_rewards.py").write_text(blocks["python"])
    (tmp_path / "my_prompts.jsonl").write_text(blocks["json"])
    command = blocks["sh"].replace("\\\n", " ").split()
    assert command[:2] == ["python", "train_lean.py"]
    assert "step 2 - reward" in succeeded(tmp_path, *command[1:]).stderr


# -------------------------------------------------------------------------------- the trainer in Python


def short(completions, **columns):
    return [1 / (1 + len(text)) for text in completions]


ROWS = [{"prompt": f"P: {letter}", "n": 1} for letter in "abcdefghijklmnop"]


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


@pytest.mark.usefixtures("made_up_plans")
def test_a_loaded_model_is_trained_itself_as_one_by_name_is(config, model_folders):
    """The rest of the arguments in both ways: rows and a `Dataset`, the tokenizer given or found."""
    folder = str(model_folders["llama"])
    config = replace(config, model=folder)
    named = Trainer(replace(config, name="a"), prompts=Dataset.from_list(ROWS), rewards=[short])
    named.train()
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    given = Trainer(
        replace(config, name="b"),
        model=model,
        prompts=ROWS,
        rewards=[short],
        tokenizer=AutoTokenizer.from_pretrained(folder),
    )
    given.train()
    assert given.model is model and torch.equal(weights(model), weights(named.model))
    assert not torch.allclose(weights(model), weights(before).float(), atol=1e-7)
    assert (given.run.folder / "config.yaml").read_text().count("in-memory") == 1  # the prompts
    found = Trainer(replace(config, name="c"), model=before, prompts=ROWS, rewards=[short])
    assert next(iter(found)).completions  # its tokenizer is where the model was; bf16 weights become fp32
    assert before.dtype == torch.float32


@pytest.mark.usefixtures("made_up_plans")
def test_steps_are_given_one_by_one_and_whoever_stops_keeps_them(config, model_folders):
    """And a loaded model goes on from a checkpoint, its reference being what it was before."""
    model, on = (AutoModelForCausalLM.from_pretrained(model_folders["gpt2"]) for _ in range(2))
    start = weights(model)
    trainer = Trainer(replace(config, steps=4), model=model, prompts=ROWS, rewards=[short])
    for step in trainer:
        assert step.number == trainer.finished and len(step.completions) == config.num_rows
        assert step.metrics["reward"] == pytest.approx(step.rewards.mean().item())
        assert step.advantages.shape == step.rewards.shape
        if step.number == 2:
            break
    (saved,) = trainer.run.checkpoints.all()
    assert saved.name == "step-000002" and find_damage(saved) is None
    resumed = replace(config, steps=4, resume=trainer.run.folder)
    further = Trainer(resumed, model=on, prompts=ROWS, rewards=[short])
    assert further.model is on and torch.equal(weights(on), weights(model))
    assert [step.number for step in further] == [3, 4]
    with further.run.reference.model() as reference:
        assert torch.equal(weights(reference), start)


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def typed(command: str, changes: dict[str, object]) -> list[object]:
    """The words of a command in the page's indented block, as the shell makes them, but for some flags."""
    text = re.search(rf"^    grpo-lean {command} (.*?[^\\])$", GSM8K, re.DOTALL | re.MULTILINE)[1]
    words: list[object] = [*shlex.split(text.replace("\\\n", " "))]
    for flag, value in changes.items():
        words[words.index(flag) + 1] = value
    return words


def test_word_problems_are_trained_on_and_evaluated_as_the_page_says(tmp_path, model_folders):
    chat_model = shutil.copytree(model_folders["qwen"], tmp_path / "qwen")
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(chat_model)
    GenerationConfig(eos_token_id=[0, 5]).save_pretrained(chat_model)  # two ends, as Qwen has them
    for name, content in files(GSM8K).items():
        (tmp_path / name).write_text(content)
    for part in ("train", "test"):
        rows = [{"question": f"{n} + {n}?", "answer": f"It is\n#### {2 * n:,}"} for n in range(20)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = typed(
        "train",
        {
            "--model": chat_model,
            "--prompts": "train.jsonl",
            "--batch-size": 16,
            "--max-new-tokens": 12,
            "--steps": 2,
            "--eval-interval": 2,
        },
    )
    system = words.index("--system-prompt") + 1
    assert words[system] == "$(cat system.txt)"
    words[system] = (tmp_path / "system.txt").read_text().strip()
    done = succeeded(tmp_path, "train_lean.py", *words, "--heldout-share", 0.2)
    assert "completions end at <|endoftext|> or" in " ".join(done.stderr.split())
    folder = tmp_path / "runs" / "gsm8k"
    metrics = [line for line in read_lines(folder / "metrics.jsonl") if "reward" in line]
    assert {"rewards/right/mean", "rewards/layout/mean", "answered"} <= metrics[-1].keys()
    (record, *_) = read_lines(folder / "completions.jsonl")
    assert record["messages"][0]["role"] == "system" and "+" in record["messages"][1]["content"]
    assert record["prompt"].endswith("<|im_start|>assistant\n")
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template == CHAT
    words = [chat_model, *typed("evaluate", {"--prompts": "test.jsonl"})[1:]]
    done = succeeded(tmp_path, "tests/grpo_lean.py", "evaluate", *words)
    assert done.stdout.count("rewards/right/mean") == 2 and " 20 │" in done.stdout  # greedy and sampled
    # held out of the run's
    succeeded(tmp_path, "tests/grpo_lean.py", "evaluate", *words[1:2], "--json", "one.json")
    assert "sampled/rewards/right/mean" in Evaluation.load(tmp_path / "one.json").scores


def test_the_rewards_of_the_page_judge_as_it_says():
    names: dict = {}
    exec(files(GSM8K)["gsm8k_rewards.py"], names)
    said = ["2 + 2 = 4\n#### 4", "#### 5", "\n#### $1,004.50", "4", "#### 3, no:\n#### 4\nDone."]
    talks = [[{"role": "assistant", "content": text}] for text in said]
    answers = ["It is\n#### 4"] * 2 + ["#### 1,004.5"] + ["#### 4"] * 2
    logged = {}
    assert names["right"](talks, answers, logged.__setitem__) == [1, 0, 1, 0, 1]
    assert logged == {"answered": 0.8}
    assert names["layout"](talks) == [1, 0, 0, 0, 0]


def test_the_first_ten_minutes_run_as_the_notebook_has_them(tmp_path, monkeypatch, capsys):
    """Cell by cell in one Python, without a notebook around them."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "docs" / "start.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    names: dict[str, object] = {}
    for cell in cells:
        exec(cell.replace("STEPS = 6", "STEPS = 2").replace("batch_size=32", "batch_size=16"), names)
    printed = capsys.readouterr().out
    assert "the model is in" in printed and " M: " in printed
    assert len(list(tmp_path.glob("runs/*"))) == 1


METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text()


def test_every_metric_of_a_run_is_explained(config):
    """By its name, or the end of it where a row names several."""
    trainer = Trainer(replace(config, steps=1, eval_interval=1, num_iterations=2, precision="fp16"))
    trainer.train()
    names = set()
    for line in (trainer.run.folder / "metrics.jsonl").read_text().splitlines():
        names |= json.loads(line).keys()
    explained = set(re.findall(r"`([\w/]+)`", METRICS_PAGE))
    ends = {name.rpartition("/")[2] for name in explained}
    mine = {name for name in names if not name.startswith(("rewards/", "eval_rewards/", "eval_policy/"))}
    mine = {name for name in mine if not name.startswith("eval_environment/")} - {"step"}
    for name in mine:
        own = name.removesuffix("/low").removesuffix("/high")
        assert own in explained or own.rpartition("/")[2] in ends or own in ("eval_reward",), name
