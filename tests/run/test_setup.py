"""How a run begins: what is found out early, its folder, its prompts and models; and the model it leaves."""

import copy
import json
import os
import socket
import stat
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from commands import here
from conftest import CONTEXT
from prompt_lines import ids, write_records
from several_processes import fork
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from whole_runs import train

from grpo.config import CONFIG_FILE, from_plain, read_yaml
from grpo.data import Prompt, load_prompts
from grpo.data.maker import TooLong
from grpo.data.source import heldout_fraction
from grpo.memory import DoesNotFit
from grpo.model.load import load_policy
from grpo.model.names import base_of
from grpo.run import planning
from grpo.run.folder import LOCK_FILE, hold_folder
from grpo.run.inputs import Inputs
from grpo.run.loading import load_source, prompt_room
from grpo.run.setup import open_run
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")
CPU = torch.device("cpu")
NEW = 10  # tokens of a completion in `config`
LONG = "a" * (CONTEXT - NEW + 1)  # a token each, and one more than there is room for
REWARD = "def f(completions, **columns):\n    return [float(len(text) % 3) for text in completions]\n"


def refused(config, given=None, **changes) -> str:
    with pytest.raises(ValueError) as error, open_run(replace(config, **changes), given or Inputs()):
        raise AssertionError("it was opened")
    return str(error.value)


def test_what_is_cheap_to_find_out_is_found_before_the_model_is_loaded(config, monkeypatch, tmp_path, logged):
    """The model is none, but that is not what the errors are about."""
    config = replace(config, model="/no/such/model")
    assert "reward 'polcy' is not known: give one of policy" in refused(config, reward=("polcy",))
    assert "there is no file" in refused(config, reward=("mine.py:f",))
    assert "no.txt" in refused(config, prompts=str(tmp_path / "no.txt"))
    assert "device is 'warp-drive'" in refused(config, device="warp-drive")
    assert "device is 'warp-drive'" in refused(config, reference_device="warp-drive")
    assert "holds no intact checkpoint" in refused(config, resume=tmp_path)
    (tmp_path / "file").touch()
    for runs_dir, reason in ((tmp_path / "file", "Not a directory"), (Path("/proc/nope"), "No such file")):
        said = refused(config, runs_dir=runs_dir)
        assert f"runs_dir is '{runs_dir}'" in said and reason in said
        assert refused(config, runs_dir=runs_dir, name=None).startswith("runs_dir is")
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        assert "trackers names wandb, which is not installed" in refused(config, trackers=("wandb",))
    assert "/no/such/model" in refused(config)
    (tmp_path / "mine.py").write_text("def brevity(completions, limit, **columns): ...")
    monkeypatch.setattr("grpo.run.loading.load_models", None)  # a reward's columns are looked for before that
    logged.clear()
    message = refused(config, model="auto", reward=(f"{tmp_path}/mine.py:brevity",))
    assert "task, fen, moves, evals, action, history: missing a required argument: 'limit'" in message
    assert logged[0].startswith("INFO model: rook-tiny")  # the first line of all says which model it is
    talk = Inputs(prompts=[{"prompt": [{"role": "user", "content": "2 + 2?"}]}])
    assert "has no chat template: give --chat-template" in refused(config, talk, model="auto")
    assert not config.runs_dir.exists()  # and no run folder is left behind by any of them


@pytest.mark.parametrize(
    ("flags", "precision", "said"),
    [
        (set(), "bf16", True),
        (set(), "auto", False),
        (set(), "fp32", False),
        ({"avx512_bf16"}, "bf16", False),
    ],
)
def test_bf16_that_the_processor_emulates_is_warned_of(config, monkeypatch, logged, flags, precision, said):
    monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: flags)
    refused(config, precision=precision, prompts="/no/file.txt")
    assert any(line.startswith("WARNING precision is bf16") for line in logged) == said


def test_a_model_too_large_for_the_device_is_no_traceback(config, monkeypatch):
    """Weights, copies and moments come before any plan: it is said what they need, and what would save."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has …")
    monkeypatch.setattr("grpo.run.setup.make_optimizer", mock.Mock(side_effect=error))
    message = refused(config, model="rook-tiny")
    for said in ("(weights 13 MB", "optimizer 27 MB, reference 13 MB)", "--lora-rank 16", "--kl-coef 0"):
        assert said in message
    assert message.endswith("(OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.)")
    assert not config.runs_dir.exists()


def test_a_finished_run_is_not_written_over_and_goes_on_only_with_more_to_do(config, logged):
    """Nothing is loaded, and nothing written, before that is said; what changes from here on is."""
    with open_run(config):
        pass
    folder = train(config)  # nothing had been learned, so nothing was lost
    message = refused(config)
    assert "name is 'test'" in message and f"--resume {folder}" in message
    before = (folder / CONFIG_FILE).read_text()
    for steps in (1, 2):
        message = refused(config, resume=folder, steps=steps, model="/no/such/model")
        assert f"steps is {steps}, but 2 steps are done: give --steps above 2" in message
    assert (folder / CONFIG_FILE).read_text() == before
    assert not any("changed from here on" in line for line in logged)
    with open_run(replace(config, resume=folder, steps=3, batch_size=16, train_rows=2)):
        pass
    (said,) = [line for line in logged if "changed from here on" in line]
    changes = "steps 2 -> 3, batch_size 8 -> 16, train_rows None -> 2, gradient_checkpointing none -> auto"
    assert said == f"INFO changed from here on: {changes}"


def test_two_runs_do_not_train_in_one_folder(config):
    """The second is told who does, before its model is loaded; when that one ends, the folder is free."""
    who = f"process {os.getpid()} on {socket.gethostname()}"
    with Trainer(config) as trainer:
        folder = trainer.run.folder
        message = refused(config, model="/no/such/model")
        assert message.startswith(f"name is 'test', but {who} is training in '{folder}'")
        assert "stop it, or choose another name" in message and "close() a Trainer" in message
        trainer.save()
        message = refused(config, resume=folder, steps=9)
        assert message.startswith(f"resume is '{folder}', but {who} is training") and "name" not in message
    trainer.close()  # again does no harm
    assert "is a run already" in refused(config)
    with open_run(replace(config, resume=folder)):
        pass


def hold_for_long(config) -> None:
    with hold_folder(config):
        time.sleep(300)


def test_another_process_holds_the_folder_until_it_is_killed(config):
    """The lock ends with it, its file stays; and a run that does not begin leaves the folder as it was."""
    other = fork(hold_for_long, config)
    mark = config.runs_dir / "test" / LOCK_FILE
    while not (mark.exists() and mark.read_text()):
        assert other.is_alive()
        time.sleep(0.02)
    message = refused(config)
    assert f"process {other.pid} on {socket.gethostname()} is training" in message
    assert "this process" not in message
    other.kill()
    other.join()
    assert mark.exists()
    with open_run(config):
        assert mark.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    left = set(mark.parent.iterdir())
    refused(config, model="/no/such/model")
    assert set(mark.parent.iterdir()) == left


def test_a_run_without_a_name_never_meets_another_and_its_yaml_repeats_it(config):
    """Not even one of the same second."""
    folders = set()
    config = replace(config, name=None)
    for _ in range(3):
        with open_run(config) as run:
            folders.add(run.folder)
            stored = from_plain(read_yaml(run.folder / CONFIG_FILE))
            assert stored == run.config == replace(config, gradient_checkpointing="none")  # auto
    assert len(folders) == 3 and {folder.parent for folder in folders} == {config.runs_dir}


def test_a_run_recomputes_layers_where_the_plan_came_to_it(config, monkeypatch):
    """Memory is made up to be so short that nothing else fits."""
    warm_up = planning.warm_up  # made up

    def short(fit, work, *rest, **options):
        if work.config.gradient_checkpointing == "none":
            raise DoesNotFit("not one row")
        warm_up(fit, work, *rest, **options)

    chosen = []
    monkeypatch.setattr(planning, "warm_up", short)
    train(config, lambda trainer: chosen.append(trainer.config.gradient_checkpointing))
    assert chosen == ["full"]


def test_held_out_prompts_are_of_both_tasks_and_not_trained_on(config):
    with open_run(config) as run:
        tasks = [prompt.task for prompt in run.eval_prompts]
        assert tasks == ["environment"] * 2 + ["policy"] * 2
        trained = {prompt.id for prompt in run.source.draw(100)}
        assert not trained & {prompt.id for prompt in run.eval_prompts}
        for task in ("environment", "policy"):
            hashes = sorted(heldout_fraction(prompt) for prompt in run.source.heldout if prompt.task == task)
            chosen = [heldout_fraction(prompt) for prompt in run.eval_prompts if prompt.task == task]
            assert len(hashes) > 2 and sorted(chosen) == hashes[:2]  # not the first of the file


def test_as_many_prompts_are_held_out_as_are_evaluated_few_are_counted_and_none_is_a_warning(
    config, tmp_path, logged
):
    def said(**changes):
        logged.clear()
        with open_run(replace(config, **{"eval_interval": 2, **changes})) as run:
            return len(run.eval_prompts), run.source.heldout, [line for line in logged if "evaluat" in line]

    assert said()[2] == []
    count, heldout, (line,) = said(eval_prompts=50)
    few = Counter(prompt.task for prompt in heldout)
    assert 4 < count == few.total() < 50 and max(few.values()) < 25
    assert line.startswith(f"INFO held out are only {few['environment']} environment, {few['policy']} policy")
    assert line.endswith(f"evaluations use {count}, not the 50 of --eval-prompts")
    for setting in ("heldout_share", "eval_prompts"):
        (line,) = said(**{setting: 0})[2]
        assert line.startswith("WARNING nothing will be evaluated") and "give more" in line
        assert f"--{setting.replace('_', '-')}" in line
    assert said(heldout_share=0, eval_interval=0)[2] == []
    path = write_records(tmp_path / "mine.jsonl", [{"prompt": f"{n}"} for n in range(1500)])
    for wanted in (1200, 1):
        asked = replace(config, prompts=path, heldout_share=0.9, eval_prompts=wanted)
        assert len(load_source(asked).heldout) == wanted


def one_too_long(folder, *, rows=100, last=""):
    """A file of the user's own prompts, the seventh of one token more than there is room for."""
    records = [{"prompt": f"{n}" if n != 7 else LONG} for n in range(1, rows + 1)]
    path = write_records(folder / "mine.jsonl", records)
    with open(path, "a") as file:
        file.write(last)
    return path


def asks(text: str) -> Prompt:
    return Prompt("row:1", text, {})


def test_a_prompt_that_just_fits_is_let_in_and_one_of_few_bytes_is_not_tokenized(model_folders):
    room = prompt_room(str(model_folders["gpt2"]), NEW)
    room.check(asks(LONG[1:]))
    with pytest.raises(TooLong, match=r"183 tokens, .* context of 192 leaves 182 beside --max-new-tokens 10"):
        room.check(asks(LONG))

    def tokenizer(texts, **_):
        asked.extend(text for text in texts if text != "a")  # by which it is seen what is put behind one
        return {"input_ids": [[0] * 10 for _ in texts]}

    asked = []
    room = prompt_room("rook-tiny", 500)  # 12 tokens are left
    object.__setattr__(room, "tokenizer", tokenizer)
    for text in ("a" * 10, "é" * 5, "a" * 11, "é" * 6, "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}"):
        room.check(asks(text))
    assert asked[:2] == ["a" * 11, "é" * 6]  # of eleven bytes: a token and a space may come in front
    assert len(asked) == 3  # the last is of three, but many tokenizers make eighteen letters of it


def test_a_prompt_too_long_for_the_model_is_skipped_and_named_and_too_many_are_an_error(
    config, tmp_path, logged
):
    """And one that is no Unicode: JSON can write half a character, which no tokenizer takes."""
    path = one_too_long(tmp_path, rows=99, last='{"prompt": "\\ud83d"}\n')
    drawn = load_source(replace(config, prompts=path, heldout_share=0, max_bad_share=0.02)).draw(98)
    assert sorted(ids(drawn)) == sorted(f"mine.jsonl:{n}" for n in range(1, 100) if n != 7)
    (warning,) = [message for message in logged if message.startswith("WARNING")]
    assert "2 of 100 rows (2.0%)" in warning and "mine.jsonl:7: a prompt of 183 tokens" in warning
    share = heldout_fraction(asks(LONG)) + 0.01  # it would be held out
    assert "mine.jsonl:7" in ids(load_prompts(path, seed=0, heldout_share=share).heldout)
    heldout = load_source(replace(config, prompts=path, heldout_share=share, max_bad_share=0.02)).heldout
    assert heldout and "mine.jsonl:7" not in ids(heldout)
    config = replace(config, prompts=one_too_long(tmp_path, rows=50, last="{\n"))
    with pytest.raises(ValueError, match=r"2 of 51 rows.*mine.jsonl:7: .* and mine.jsonl:51: ") as error:
        load_source(config)
    for said in ("leaves 182 beside", "lower --max-new-tokens", "another --model", "--max-bad-share 0.04"):
        assert said in str(error.value)
    config = replace(config, max_new_tokens=9, max_bad_share=0.02)
    assert len(set(ids(load_source(replace(config, heldout_share=0)).draw(50)))) == 50


def test_tokens_that_a_model_has_no_rows_for_matter_where_a_prompt_has_them(config, load, logged):
    """On CUDA one ends the process. Another model's tokenizer is refused, an end without a row is told."""
    small = GPT2LMHeadModel(GPT2Config(vocab_size=600, n_positions=CONTEXT, n_embd=8, n_layer=1, n_head=1))
    message = refused(config, Inputs(small, load("gpt2").tokenizer))
    assert "has 902 tokens, but the model has rows for 600" in message
    policy = load("gpt2")
    model, tokenizer = policy.model, copy.deepcopy(policy.tokenizer)
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    rows = [{"prompt": f"Say {n}."} for n in range(9)] + [{"prompt": "Say <think>."}]
    config = replace(config, heldout_share=0, steps=5)  # all of its prompts
    given = Inputs(model, tokenizer, rows, [lambda completions, **columns: [1.0] * len(completions)])
    assert "row 10: the token '<think>', which the tokenizer knows and the model" in refused(config, given)
    with open_run(replace(config, max_bad_share=0.1), given) as run:
        (trainer := Trainer(run)).train()
    assert trainer.finished == 5
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    with open_run(replace(config, name="end"), Inputs(model, tokenizer)):
        pass
    assert "WARNING the model has 902 tokens and cannot write <end>, which is to end a text" in logged


def test_a_model_may_have_rows_that_its_tokenizer_has_no_token_for(config, load):
    """Embeddings that were made larger: such an id may be sampled, and what is saved loads as it was."""
    policy = load("llama")
    policy.model.resize_token_embeddings(1000)
    with torch.no_grad():  # often
        policy.model.get_output_embeddings().weight[902:] *= 20
    trainer = Trainer(replace(config, steps=1), model=policy.model, tokenizer=policy.tokenizer)
    (step,) = trainer
    assert (step.batch.ids >= 902).any() and len(step.completions) == config.num_rows
    saved = load_policy(str(trainer.run.folder), CPU, "fp32").model
    assert torch.equal(saved.get_output_embeddings().weight, policy.model.get_output_embeddings().weight)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([[5, 9, 2, 7]])).logits


def trained(config, name: str, **changes) -> Trainer:
    trainer = Trainer(replace(config, steps=1, name=name, **changes))
    trainer.train()
    return trainer


@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "adapters"])
def test_the_model_to_use_is_what_the_last_step_left(config, rank):
    trainer = trained(config, "a", model="rook-tiny", lora_rank=rank)
    folder = trainer.run.checkpoints.model
    assert folder == trainer.run.folder / "model"
    files = list(folder.iterdir())
    assert not [file for file in files if file.name.startswith(("trainer.", "manifest", "reference"))]
    os.umask(umask := os.umask(0))
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}  # others may read it
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.allclose(logits(plain), logits(trainer.model), atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder)("P: 8").input_ids
    newest = trainer.run.checkpoints.all()[-1]
    for name in (trainer.run.folder, newest):  # a run, and a path into it, are names of models as well
        loaded = load_policy(str(name), CPU, "fp32").model
        assert torch.allclose(logits(loaded), logits(trainer.model), atol=1e-5)
        assert all(parameter.requires_grad for parameter in loaded.parameters())
    if rank:  # whose bundled base is found where it is now
        file = folder / "adapter_config.json"
        written = json.loads(file.read_text())
        assert Path(written["base_model_name_or_path"]).is_dir()
        written["base_model_name_or_path"] = "/elsewhere/grpo/assets/rook-tiny"
        file.write_text(json.dumps(written))
        assert base_of(str(folder)) == "rook-tiny"


def test_adapters_on_a_model_that_had_some_have_a_base_that_is_found(config):
    first = trained(config, "a", lora_rank=2)
    again = trained(config, "b", lora_rank=2, model=str(first.run.folder))
    model = again.run.checkpoints.model
    base = json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base) == again.run.folder / "base"
    merged, whole, left = (
        logits(AutoModelForCausalLM.from_pretrained(each))
        for each in (first.run.checkpoints.model, base, model)
    )
    assert torch.allclose(merged, whole, atol=1e-5)
    assert torch.allclose(left, logits(again.model), atol=1e-5)
    on = trained(config, "c", model=str(first.run.folder))  # all of it is trained
    assert not (on.run.folder / "base").exists() and not torch.equal(logits(on.model), merged)


def test_a_run_goes_on_anywhere_and_tells_of_a_reward_that_has_changed(tmp_path, monkeypatch, quick_flags):
    """And how the model is loaded that it leaves."""
    (tmp_path / "mine.py").write_text(REWARD)
    write_records(tmp_path / "mine.jsonl", [{"prompt": f"P: {letter}"} for letter in "abcdefgh"])
    own = ["--prompts", "mine.jsonl", "--heldout-share", 0, "--reward", "mine.py:f", "--trackers"]
    monkeypatch.chdir(tmp_path)
    done = here("train", *quick_flags, *own, "--name", "a", "--steps", 1)
    assert done.returncode == 0, done.stderr
    assert f"AutoModelForCausalLM.from_pretrained({str(Path('runs/a/model'))!r})" in done.stderr
    (tmp_path / "mine.py").write_text(REWARD + "\n# another\n")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    done = here("train", "--resume", tmp_path / "runs/a", "--steps", 2)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "reward 'f' is not what it was" in said and "mine.py differs from its copy" in said
    assert (tmp_path / "runs/a/rewards/f.py").read_text() == REWARD
    assert "reward 'f' is not what it was" in (tmp_path / "runs/a/log.txt").read_text()
