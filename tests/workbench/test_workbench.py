"""What the workbench stands on: models from numbers, corpora, worker processes, predicted steps."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from commands import run
from forked import forked_workers

from grpo.config.groups import Checkpointing
from grpo.memory import peak_live_bytes
from grpo.workbench.corpus import byte_corpus, open_corpus, token_corpus, train_tokenizer
from grpo.workbench.language import accumulate_lm, heldout_loss
from grpo.workbench.models import context_of, load_or_make, num_parameters, random_model
from grpo.workbench.predict import StepMemory, StepSettings
from grpo.workbench.processes import run_worker
from grpo.workbench.spec import ModelSpec

CPU = torch.device("cpu")
TINY = {"layers": 2, "width": 32, "heads": 2, "context": 48, "vocab": 64}


def test_models_from_numbers_have_the_parameters_that_follow_and_named_ones_their_own():
    recipe = ModelSpec(arch="llama", layers=4, width=512, d_ff=1344, heads=16, vocab=10000, untied=True)
    assert num_parameters(recipe.config()) == 22_696_448
    assert recipe.config().rope_parameters["rope_theta"] == 10000.0
    # embeddings (64 + 48)·32; a block: 2 norms, 4·32² + 4·32 of attention, 2·32·128 + 128 + 32; a norm
    block = 2 * 64 + 4 * 32**2 + 4 * 32 + 2 * 32 * 128 + 128 + 32
    gpt2, untied = (ModelSpec(arch="gpt2", untied=untied, **TINY).config() for untied in (False, True))
    assert num_parameters(gpt2) == 112 * 32 + 2 * block + 64 and context_of(gpt2) == 48
    assert num_parameters(untied) == num_parameters(gpt2) + 64 * 32
    assert ModelSpec().name == "rook-tiny" and num_parameters(ModelSpec().config()) == 3_521_536
    model = load_or_make(ModelSpec(), CPU, torch.float32)
    assert model.transformer.wte.weight.std() > 0.03  # random ones start at 0.02


def test_a_byte_corpus_is_the_file_and_its_last_tenth_is_held_out(tmp_path):
    def corpus(size):
        (tmp_path / "text").write_bytes(bytes(range(size)))
        return byte_corpus(tmp_path / "text")

    found, generator = corpus(200), torch.Generator().manual_seed(0)
    assert found.num_train == 180 and found.vocab == 256
    windows = found.train_windows(50, 8, generator)
    assert windows.shape == (50, 9) and (windows[:, 1:] - windows[:, :-1] == 1).all()
    assert found.heldout_windows(10, 8).tolist() == [list(range(180, 189)), list(range(188, 197))]
    windows = corpus(100).train_windows(3000, 8, generator)
    assert windows.min() == 0 and windows.max() == 89  # both ends of the training part


def test_a_tokenizer_is_trained_once_where_the_vocabulary_asks_for_it(tmp_path, monkeypatch):
    """It has the size that was asked for, and gives the text back."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path / "cache")
    text = "the cat sat on the mat, and the dog sat on the cat. " * 50
    (tmp_path / "text").write_text(text)
    tokenizer = train_tokenizer(tmp_path / "text", 270)
    assert tokenizer.get_vocab_size() == 270
    corpus = token_corpus(tmp_path / "text", tokenizer)
    assert tokenizer.decode(corpus.ids.tolist()) == text and len(corpus.ids) < len(text) / 2
    spec = ModelSpec(arch="gpt2", **TINY | {"context": 16, "vocab": 270})
    stored = []
    for _ in range(2):
        assert open_corpus(str(tmp_path / "text"), spec).vocab == 270
        stored.append([(file, file.stat().st_mtime_ns) for file in (tmp_path / "cache/corpora").iterdir()])
    assert stored[0] == stored[1] and len(stored[0]) == 2  # the tokenizer, and the text in its tokens
    assert open_corpus(str(tmp_path / "text"), replace(spec, vocab=256)).vocab == 256


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_the_language_loss_is_hugging_faces_and_no_split_changes_it(arch):
    """A row at a time has fewer tokens than words: its embeddings get their gradient in place."""
    model = random_model(ModelSpec(arch=arch, **TINY).config(), CPU, torch.float64)
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
    mean, error = heldout_loss(model, windows, dtype=torch.float64, rows=4)
    each = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)
    assert mean == pytest.approx(expected.item(), rel=exact)
    assert error == pytest.approx(each.std().item() / 6**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("arch", "dtype", "checkpointing"),
    [("gpt2", torch.float32, "selective"), ("llama", torch.bfloat16, "none")],
)
def test_learning_from_windows_holds_what_was_predicted(arch, dtype, checkpointing):
    config = ModelSpec(arch=arch, **TINY | {"vocab": 300, "context": 96}).config()
    memory = StepMemory(StepSettings("lm", config, dtype, new_tokens=96, checkpointing=checkpointing))
    model, windows = random_model(config, CPU, dtype), torch.randint(300, (24, 97))
    for rows in (24, 8):
        model.zero_grad(set_to_none=True)
        learn = partial(accumulate_lm, model, windows, dtype=dtype, rows=rows, checkpointing=checkpointing)
        parts = memory.by_phase(24, rows)["learn"]
        added = sum(parts[name] for name in ("gradients", "logits", "activations"))
        assert added == pytest.approx(peak_live_bytes(learn), rel=0.01)


def test_a_grpo_step_has_the_phases_and_parts_of_a_run(monkeypatch):
    """What a trace would find is made up: a kB a row; traces of GRPO are tested elsewhere."""
    monkeypatch.setattr(
        "grpo.plan.trace.TracedPhases.added_bytes", lambda self, phase, size: 1000 * size.rows
    )
    config = ModelSpec(arch="gpt2", **TINY | {"context": 64}).config()
    settings = StepSettings("grpo", config, torch.float32, prompt_tokens=8, new_tokens=16, group_size=4)
    memory = StepMemory(settings, overhead_bytes=7)
    phases, weights = memory.by_phase(8), 4 * num_parameters(config)
    assert set(phases) == {"sample", "score", "learn"}
    for (
        parts
    ) in phases.values():  # weights, moments and reference; a tenth more than tensors add; the process
        assert parts.peak_bytes == pytest.approx(4 * weights + 1.1 * 8000 + 7)
    room = memory.largest_phase(20)[1].peak_bytes
    assert [memory.largest_batch(room + more, at_most=99) for more in (1, -1)] == [20, 16]
    alone = StepMemory(replace(settings, kl=False)).by_phase(8)
    assert "score" not in alone and "reference" not in alone["learn"]


def test_the_largest_batch_is_the_largest_whose_phases_fit():
    config = ModelSpec(arch="gpt2", **TINY).config()
    memory = StepMemory(StepSettings("lm", config, torch.float32, new_tokens=48), overhead_bytes=10**6)
    room, more = (memory.largest_phase(size)[1].peak_bytes for size in (37, 38))
    half = (more - room) / 2
    limits = ((room + half, 1000), (room - half, 1000), (room, 20), (10**6, 1000))
    assert [memory.largest_batch(usable, at_most=most) for usable, most in limits] == [37, 36, 20, 0]


@pytest.mark.parametrize(
    ("body", "limited", "status", "words"),
    [
        ("print(json.dumps({'ended': 'ok', 'message': None}))", False, "ok", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", False, "out of memory", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", False, "failed", ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", True, "out of memory", "SIGSEGV"),
        ("raise RuntimeError('no such thing')", False, "failed", "no such thing"),
        ("sys.exit('libgomp: Thread creation failed')", True, "out of memory", "libgomp"),
    ],
)
@pytest.mark.parametrize("started", [nullcontext, forked_workers])
def test_a_workers_records_come_one_by_one_and_its_end_or_death_is_a_result(
    tmp_path, monkeypatch, body, limited, status, words, started
):
    """In a module that no library slows down; started as for people, and as in other tests."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)  # a fork's
    (tmp_path / "some_worker.py").write_text(
        "import json, os, signal, sys\nfor i in range(json.loads(sys.argv[1])['size']):\n"
        f"    print(json.dumps({{'i': i}}), flush=True)\n{body}\n"
    )
    records = []
    with started():
        ended = run_worker("some_worker", {"size": 3}, records.append, limited=limited)
    assert ended.status == status and words in (ended.message or "")
    assert records == [{"i": 0}, {"i": 1}, {"i": 2}]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("torch.OutOfMemoryError('none left')", "out of memory"), ("ValueError('wrong')", "failed"),
        ("FloatingPointError('loss is nan')", "diverged"),
    ],
)  # fmt: skip
def test_a_worker_says_how_it_ended(tmp_path, error, status):
    (tmp_path / "some_worker.py").write_text(
        "import os, torch\nfrom grpo.workbench.processes import worker\n"
        f"with worker() as (task, say):\n    print('noise', flush=True)\n    os.write(1, b'from C')\n"
        f"    say({{'seen': task}})\n    raise {error}\n"
    )
    done = run(tmp_path / "some_worker.py", '{"a": 1}', cwd=tmp_path)
    seen, end = map(json.loads, done.stdout.splitlines())
    assert seen == {"seen": {"a": 1}} and end["ended"] == status
    assert "noise" in done.stderr and "from C" in done.stderr
