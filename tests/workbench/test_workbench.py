"""The ground of the workbench: models from numbers, corpora, tasks in processes of their own."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forked import forked_workers
from tokenizers import Tokenizer

from grpo.config import Config, SettingsError
from grpo.config.groups import Checkpointing
from grpo.learning.masters import split_masters
from grpo.learning.step import Diverged
from grpo.memory import DoesNotFit, PassSize, peak_live_bytes
from grpo.model.load import context_length
from grpo.model.target import make_target
from grpo.workbench import trial
from grpo.workbench.corpus import Corpus, open_corpus, trained_tokenizer
from grpo.workbench.lm import accumulate_lm, added_bytes, heldout_losses
from grpo.workbench.models import model_shape, num_parameters, random_model
from grpo.workbench.settings import Calculator, FindMax, Task
from grpo.workbench.sweep_settings import Sweep

CPU = torch.device("cpu")


def made(**changes) -> Task:
    tiny = {"arch": "gpt2", "layers": 2, "width": 32, "heads": 2, "context": 48, "vocab": 64}
    return Task(**{**tiny, "objective": "lm", **changes})


def test_models_from_numbers_have_the_parameters_that_follow_and_named_ones_their_own():
    recipe = model_shape(
        made(arch="llama", layers=4, width=512, d_ff=1344, heads=16, vocab=10000, untied=True)
    )
    assert num_parameters(recipe) == 22_696_448 and recipe.rope_parameters["rope_theta"] == 10000.0
    # embeddings (64 + 48)·32; a block: 2 norms, 4·32² + 4·32 of attention, 2·32·128 + 128 + 32; a norm
    block = 2 * 64 + 4 * 32**2 + 4 * 32 + 2 * 32 * 128 + 128 + 32
    gpt2, untied = (model_shape(made(untied=untied)) for untied in (False, True))
    assert num_parameters(gpt2) == 112 * 32 + 2 * block + 64 and context_length(gpt2) == 48
    assert num_parameters(untied) == num_parameters(gpt2) + 64 * 32
    assert Task().model_name == "rook-tiny" and num_parameters(model_shape(Task())) == 3_521_536


def test_windows_are_cut_from_all_but_the_last_tenth_which_is_held_out():
    corpus, generator = Corpus(np.arange(200), 256), torch.Generator().manual_seed(0)
    assert corpus.num_train == 180
    windows = corpus.train_windows(50, 8, generator)
    assert windows.shape == (50, 9) and (windows[:, 1:] - windows[:, :-1] == 1).all()
    assert corpus.heldout_windows(10, 8).tolist() == [list(range(180, 189)), list(range(188, 197))]
    windows = Corpus(np.arange(100), 256).train_windows(3000, 8, generator)
    assert windows.min() == 0 and windows.max() == 89  # both ends of the training part


def test_a_tokenizer_is_trained_once_where_the_vocabulary_asks_for_it(tmp_path, monkeypatch):
    """It has the size that was asked for, and gives the text back; elsewhere a text is its bytes."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path / "cache")
    text = "the cat sat on the mat, and the dog sat on the cat. " * 50
    (tmp_path / "text").write_text(text)
    larger, stored = made(context=16, vocab=270, data=str(tmp_path / "text")), []
    for _ in range(2):
        corpus = open_corpus(larger)
        stored.append([(file, file.stat().st_mtime_ns) for file in (tmp_path / "cache/corpora").iterdir()])
    assert stored[0] == stored[1] and len(stored[0]) == 2  # the tokenizer, and the text in its tokens
    tokenizer = Tokenizer.from_file(str(trained_tokenizer(tmp_path / "text", larger)))
    assert tokenizer.get_vocab_size() == corpus.vocab == 270
    assert tokenizer.decode(corpus.ids.tolist()) == text and len(corpus.ids) < len(text) / 2
    of_bytes = open_corpus(replace(larger, vocab=256))
    assert of_bytes.vocab == 256 and bytes(of_bytes.ids) == text.encode()


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_the_language_loss_is_hugging_faces_and_no_split_changes_it(arch):
    """A row at a time has fewer tokens than words: its embeddings get their gradient in place."""
    shape = model_shape(made(arch=arch))
    model = random_model(make_target(shape, CPU, "fp64"))
    windows = torch.randint(64, (6, 21), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=windows[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    exact = 1e-12 if arch == "gpt2" else 1e-6  # Hugging Face computes RMS norms in fp32
    for rows in (6, 4, 1):
        for checkpointing in get_args(Checkpointing):
            model.zero_grad()
            done = accumulate_lm(model, windows, dtype=torch.float64, rows=rows, checkpointing=checkpointing)
            assert done["loss"] == pytest.approx(expected.item(), rel=exact)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=exact, atol=exact)
    each = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)
    losses = heldout_losses(model, windows, dtype=torch.float64, rows=4)
    torch.testing.assert_close(losses, each.detach(), rtol=max(exact, 1e-7), atol=0)


@pytest.mark.parametrize(
    ("arch", "dtype", "checkpointing"),
    [("gpt2", torch.float32, "full"), ("llama", torch.bfloat16, "none")],
)
def test_learning_from_windows_holds_what_was_predicted(arch, dtype, checkpointing):
    target = make_target(model_shape(made(arch=arch, vocab=300, context=96)), CPU, dtype)
    model, windows = random_model(target), torch.randint(300, (24, 97))
    split_masters(model, dtype)
    for rows in (24, 8):
        model.zero_grad(set_to_none=True)
        learn = partial(accumulate_lm, model, windows, dtype=dtype, rows=rows, checkpointing=checkpointing)
        added = added_bytes(target, PassSize(rows, 96), checkpointing=checkpointing)
        assert added == pytest.approx(peak_live_bytes(learn), rel=0.01)


def test_tasks_survive_json_and_flags_are_those_of_train_over_a_file(tmp_path):
    task = made(batch_size=12, data="a.txt", compile=True, prompt_tokens=5, stop=("a", "b"))
    trial.write_task(task, tmp_path)
    assert trial.read_task(tmp_path) == task and replace(task, train_rows=4).rows == 4 and task.rows == 12
    file = tmp_path / "train.yaml"
    file.write_text("group_size: 4\nprofiles:\n  small:\n    max_new_tokens: 20\n")
    found = FindMax.parse(["--config", str(file), "--profile", "small", "--start", "8", "--kl-coef", "0"])
    assert (found.group_size, found.max_new_tokens, found.start, found.kl_coef) == (4, 20, 8, 0)
    assert found.multiple == 4 and found.train == Config(group_size=4, max_new_tokens=20, kl_coef=0)


@pytest.mark.parametrize(
    ("body", "limited", "status", "words"),
    [
        ("json.dump({'status': 'ok', 'message': None}, open(folder + '/ended.json', 'w'))", False, "ok", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", False, "out of memory", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", False, "failed", ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", True, "out of memory", "SIGSEGV"),
        ("raise RuntimeError('no such thing')", False, "failed", "no such thing"),
        ("sys.exit('libgomp: Thread creation failed')", True, "out of memory", "libgomp"),
    ],
)
@pytest.mark.parametrize("started", [nullcontext, forked_workers])
def test_what_a_process_writes_is_seen_as_it_comes_and_its_end_or_death_is_a_result(
    tmp_path, monkeypatch, body, limited, status, words, started
):
    """In a module that no library slows down; started as for people, and as in other tests."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)  # a fork's
    (tmp_path / "some_task.py").write_text(
        "import json, os, signal, sys\nfolder = sys.argv[1]\n"
        "task = json.load(open(folder + '/task.json'))\nfile = open(folder + '/metrics.jsonl', 'a')\n"
        "for i in range(task['batch_size']):\n    print(json.dumps({'step': i}), file=file, flush=True)\n"
        f"{body}\n"
    )
    monkeypatch.setattr(trial, "__name__", "some_task")
    lines, task = [], made(batch_size=3, memory_limit="8GB" if limited else None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 99}\n')  # of an earlier try
    with started():
        ended = trial.run_task(task, tmp_path / "a", lines.append)
    assert ended.status == status and words in (ended.message or "")
    assert lines == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert json.loads((tmp_path / "a/ended.json").read_text())["status"] == status


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (torch.OutOfMemoryError("none left"), "out of memory", "none left"),
        (DoesNotFit("one row"), "out of memory", "one row"),
        (Diverged("not finite"), "diverged", "not finite"),
        (FloatingPointError("loss is nan\nsaid where"), "diverged", "loss is nan"),
        (ValueError("wrong"), "failed", "ValueError: wrong"),
    ],
)
def test_how_a_task_ended_is_in_its_folder(tmp_path, monkeypatch, error, status, message):
    trial.write_task(made(data="bundled"), tmp_path)
    monkeypatch.setattr(trial, "train_lm", mock.Mock(side_effect=error))
    assert trial.do_task(tmp_path) == trial.TrialStatus(status, message)
    assert json.loads((tmp_path / "ended.json").read_text()) == {"status": status, "message": message}


@pytest.mark.parametrize("settings", [FindMax, Calculator, Sweep])
def test_help_lists_no_flag_that_is_refused(settings, capsys):
    with pytest.raises(SystemExit):
        settings.parse(["--help"])
    shown = capsys.readouterr().out
    assert "--learning-rate" in shown
    for name in settings.MANAGED_FLAGS:
        flag = f"--{name.replace('_', '-')}"
        assert not re.search(rf"{flag}\b(?!-)", shown), flag
        with pytest.raises(SettingsError, match=f"{flag} is given"):
            settings.parse([flag, "1"])
