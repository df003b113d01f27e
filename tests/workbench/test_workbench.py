"""What the workbench stands on: models from numbers, corpora, worker processes, predicted steps."""

import json
import signal
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from commands import run
from transformers import AutoModelForCausalLM

from grpo.config import SettingsError
from grpo.config.groups import Checkpointing
from grpo.memory import peak_live_bytes
from grpo.memory.phase import Slack
from grpo.workbench.corpus import byte_corpus, check_file, token_corpus, train_tokenizer
from grpo.workbench.language import accumulate_lm, heldout_loss
from grpo.workbench.models import context_of, num_parameters, random_model
from grpo.workbench.predict import StepMemory, StepSettings
from grpo.workbench.processes import run_worker
from grpo.workbench.spec import ModelSpec

CPU = torch.device("cpu")
TINY = {"layers": 2, "width": 32, "heads": 2, "context": 48, "vocab": 64}


# ----------------------------------------------------------------------------------------- models


def test_the_llama_of_the_recipe_has_exactly_its_parameters():
    spec = ModelSpec(arch="llama", layers=4, width=512, d_ff=1344, heads=16, vocab=10000, untied=True)
    assert num_parameters(spec.config()) == 22_696_448
    assert spec.config().rope_parameters["rope_theta"] == 10000.0


def test_a_gpt2_from_numbers_by_hand():
    # embeddings (64 + 48)·32; a block: 2 norms, 4·32² + 4·32 of attention, 2·32·128 + 128 + 32; a norm
    block = 2 * 64 + 4 * 32**2 + 4 * 32 + 2 * 32 * 128 + 128 + 32
    assert num_parameters(ModelSpec(arch="gpt2", **TINY).config()) == 112 * 32 + 2 * block + 64
    untied = num_parameters(ModelSpec(arch="gpt2", untied=True, **TINY).config())
    assert untied == 112 * 32 + 2 * block + 64 + 64 * 32
    assert context_of(ModelSpec(arch="gpt2", **TINY).config()) == 48


def test_the_bundled_model_is_the_default():
    assert ModelSpec().name == "rook-tiny" and num_parameters(ModelSpec().config()) == 3_521_536


@pytest.mark.parametrize(
    "given, message",
    [
        ({"model": "x", "arch": "gpt2"}, "give one of the two"),
        ({"layers": 0}, "layers is 0"),
        ({"width": 100, "heads": 3}, "not a multiple of 3 heads"),
        ({"heads": 4, "kv_heads": 3}, "no divisor of 4 heads"),
        ({"d_ff": 0}, "d_ff is 0"),
        ({"arch": "llama", "width": 12, "heads": 4}, "rotated in pairs"),
    ],
)
def test_models_that_cannot_be(given, message):
    with pytest.raises(SettingsError, match=message):
        ModelSpec(**given)


# ---------------------------------------------------------------------------------------- corpora


def test_a_byte_corpus_is_the_file_and_its_last_tenth_is_held_out(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    corpus = byte_corpus(tmp_path / "text")
    assert corpus.num_train == 180 and corpus.vocab == 256
    windows = corpus.train_windows(50, 8, torch.Generator().manual_seed(0))
    assert windows.shape == (50, 9) and windows.max() < 180
    assert (windows[:, 1:] - windows[:, :-1] == 1).all()
    held = corpus.heldout_windows(10, 8)
    assert held.tolist() == [list(range(180, 189)), list(range(188, 197))]


def test_windows_reach_both_ends_of_the_training_part(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(100)))
    windows = byte_corpus(tmp_path / "text").train_windows(3000, 8, torch.Generator().manual_seed(0))
    assert windows.min() == 0 and windows.max() == 89


def test_a_trained_tokenizer_has_its_size_and_gives_the_text_back(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path / "cache")
    text = "the cat sat on the mat, and the dog sat on the cat. " * 50
    (tmp_path / "text").write_text(text)
    tokenizer = train_tokenizer(tmp_path / "text", 270)
    assert tokenizer.get_vocab_size() == 270
    corpus = token_corpus(tmp_path / "text", tokenizer)
    assert tokenizer.decode(corpus.ids.tolist()) == text and len(corpus.ids) < len(text) / 2
    (stored,) = (tmp_path / "cache" / "corpora").iterdir()
    before = stored.stat().st_mtime_ns
    token_corpus(tmp_path / "text", tokenizer)
    assert stored.stat().st_mtime_ns == before


def test_corpora_that_cannot_be(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    with pytest.raises(SettingsError, match="give --data FILE"):
        check_file(None)
    with pytest.raises(SettingsError, match="which is no file"):
        byte_corpus(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="which is empty"):
        byte_corpus(tmp_path / "empty")
    with pytest.raises(SettingsError, match="need 91: give a longer file"):
        byte_corpus(tmp_path / "short").check(vocab=256, context=8)
    with pytest.raises(SettingsError, match="vocabulary has 97"):
        byte_corpus(tmp_path / "short").check(vocab=97, context=8)
    with pytest.raises(SettingsError, match="at least 256"):
        train_tokenizer(tmp_path / "short", 100)


# --------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_the_language_loss_is_hugging_faces_and_no_split_changes_it(arch):
    model = random_model(ModelSpec(arch=arch, **TINY).config(), CPU, torch.float64)
    windows = torch.randint(64, (6, 21), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=windows[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    # Hugging Face computes RMS norms in fp32.
    exact = 1e-12 if arch == "gpt2" else 1e-6
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


# ------------------------------------------------------------------------------------- prediction


@pytest.mark.parametrize(
    "arch, dtype, checkpointing",
    [
        ("gpt2", torch.float32, "selective"),
        ("llama", torch.bfloat16, "none"),
        ("gpt2", torch.float32, "full"),
    ],
)
def test_learning_from_windows_holds_what_was_predicted(arch, dtype, checkpointing):
    config = ModelSpec(arch=arch, **TINY | {"vocab": 300, "context": 96}).config()
    memory = StepMemory(StepSettings("lm", config, dtype, new_tokens=96, checkpointing=checkpointing))
    model = random_model(config, CPU, dtype)
    for rows, at_once in ((24, 24), (24, 8)):
        windows = torch.randint(300, (rows, 97))
        model.zero_grad(set_to_none=True)

        def learn(windows=windows, at_once=at_once):
            accumulate_lm(model, windows, dtype=dtype, rows=at_once, checkpointing=checkpointing)

        footprint = memory.footprints(rows, at_once)["learn"]
        added = sum(footprint.parts[name] for name in ("gradients", "logits", "activations"))
        true = peak_live_bytes(learn)
        assert added == pytest.approx(true, rel=0.01)


@pytest.mark.usefixtures("made_up_plans")
def test_the_largest_batch_is_the_largest_whose_footprint_fits():
    config = ModelSpec(arch="gpt2", **TINY).config()
    memory = StepMemory(StepSettings("lm", config, torch.float32, new_tokens=48), overhead_bytes=10**6)
    room = memory.largest_phase(37)[1].upper_bytes
    assert memory.largest_batch(room, at_most=1000) == 37
    assert memory.largest_batch(room - 1, at_most=1000) == 36
    assert memory.largest_batch(room, at_most=20) == 20
    assert memory.largest_batch(10**6, at_most=1000) == 0


def test_a_grpo_step_has_the_phases_and_parts_of_a_run(monkeypatch):
    """What a trace would find is made up: a kB a row; traces of GRPO are tested elsewhere."""
    monkeypatch.setattr("grpo.plan.trace.PhaseTracer.fit", lambda *_: lambda shape: 1000.0 * shape.rows)
    monkeypatch.setattr("grpo.plan.build.usual_slack", lambda work, phase: Slack(0.0, 0.0))
    config = ModelSpec(arch="gpt2", **TINY | {"context": 64}).config()
    settings = StepSettings("grpo", config, torch.float32, prompt_tokens=8, new_tokens=16, group_size=4)
    memory = StepMemory(settings, overhead_bytes=7)
    phases = memory.footprints(8)
    assert set(phases) == {"sample", "score", "learn", "update"}
    weights = 4 * num_parameters(config)
    assert phases["sample"].peak_bytes == pytest.approx(4 * weights + 8000 + 7)  # weights, moments, reference
    assert phases["update"].peak_bytes == pytest.approx(5 * weights + 7)
    assert memory.largest_batch(memory.largest_phase(20)[1].upper_bytes, at_most=99) >= 20
    alone = StepMemory(replace(settings, kl=False)).footprints(8)
    assert "score" not in alone and "reference" not in alone["learn"].parts


# -------------------------------------------------------------------------------------- processes


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a worker module that no library slows down, and runs it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(body, **options):
        (tmp_path / "some_worker.py").write_text("import json, os, signal, sys\n" + body)
        records = []
        return run_worker("some_worker", {"size": 3}, records.append, **options), records

    return run


def test_a_workers_records_come_one_by_one_and_its_end_is_said(module):
    ended, records = module(
        "size = json.loads(sys.argv[1])['size']\n"
        "for i in range(size): print(json.dumps({'i': i}))\n"
        "print(json.dumps({'ended': 'ok', 'message': None}))\n"
    )
    assert ended.status == "ok" and records == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_a_workers_death_is_a_result(module):
    killed, _ = module(f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert killed.status == "out of memory" and "SIGKILL" in killed.message
    crashed, _ = module(f"os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    assert crashed.status == "failed"
    limited, _ = module(f"os.kill(os.getpid(), {int(signal.SIGSEGV)})", limited=True)
    assert limited.status == "out of memory" and "SIGSEGV" in limited.message
    broken, records = module("print('{}', flush=True); raise RuntimeError('no such thing')")
    assert broken.status == "failed" and "no such thing" in broken.message and records == [{}]
    no_thread, _ = module("sys.exit('libgomp: Thread creation failed')", limited=True)
    assert no_thread.status == "out of memory"


@pytest.mark.parametrize(
    "error, status",
    [
        ("torch.OutOfMemoryError('none left')", "out of memory"),
        ("FloatingPointError('loss is nan')", "diverged"),
        ("ValueError('wrong')", "failed"),
    ],
)
def test_a_worker_says_how_it_ended(tmp_path, error, status):
    (tmp_path / "some_worker.py").write_text(
        "import os, torch\nfrom grpo.workbench.processes import worker\n"
        f"with worker() as (task, say):\n    print('noise', flush=True)\n    os.write(1, b'from C')\n"
        f"    say({{'seen': task}})\n    raise {error}\n"
    )
    done = run(tmp_path / "some_worker.py", '{"a": 1}', cwd=tmp_path)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == {"seen": {"a": 1}} and lines[1]["ended"] == status
    assert "noise" in done.stderr and "from C" in done.stderr


def test_named_models_load_with_their_own_weights():
    from grpo.workbench.models import load_or_make

    model = load_or_make(ModelSpec(), CPU, torch.float32)
    assert isinstance(model, type(AutoModelForCausalLM.from_config(ModelSpec().config())))
    assert model.transformer.wte.weight.std() > 0.03  # random ones start at 0.02
