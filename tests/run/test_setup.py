import dataclasses
import os
import socket
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console

from grpo.config import CONFIG_FILE, from_flat, read_yaml
from grpo.data.split import heldout_fraction
from grpo.run.folder import LOCK_FILE
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run, plan_together
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")


def refused(config, **changes) -> str:
    with pytest.raises(ValueError) as error, open_run(dataclasses.replace(config, **changes)):
        raise AssertionError("it was opened")
    return str(error.value)


def test_what_is_cheap_to_find_out_is_found_before_the_model_is_loaded(config, monkeypatch, tmp_path):
    """The model is none, but that is not what the errors are about."""
    config = dataclasses.replace(config, model="/no/such/model")
    assert "reward 'polcy' is not known: give one of policy" in refused(config, reward=("polcy",))
    assert "there is no file" in refused(config, reward=("mine.py:f",))
    assert "no.txt" in refused(config, prompts=str(tmp_path / "no.txt"))
    assert "device is 'warp-drive'" in refused(config, device="warp-drive")
    assert "device is 'warp-drive'" in refused(config, reference_device="warp-drive")
    assert "holds no intact checkpoint" in refused(config, resume=tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "trackers names wandb, which is not installed" in refused(config, trackers=("wandb",))
    monkeypatch.undo()
    assert "/no/such/model" in refused(config)
    assert not config.runs_dir.exists()  # and no run folder is left behind by any of them


def test_a_rewards_columns_are_looked_for_before_weights_are_loaded(config, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text("def brevity(completions, limit, **columns): ...")
    monkeypatch.setattr("grpo.run.setup.load_models", None)
    message = refused(config, reward=(f"{tmp_path}/mine.py:brevity",))
    assert "needs the column limit; the prompts have task, fen, moves, evals, action, history" in message


def test_the_first_line_of_all_says_which_model(config, logged):
    with (
        pytest.raises(ValueError),
        open_run(dataclasses.replace(config, model="auto", prompts="/no/file.txt")),
    ):
        pass
    assert logged[0].startswith("INFO model: rook-tiny")


@pytest.mark.parametrize(("flags", "precision", "said"), [
    (set(), "bf16", True), (set(), "auto", False), (set(), "fp32", False), ({"avx512_bf16"}, "bf16", False),
])  # fmt: skip
def test_bf16_that_the_processor_emulates_is_warned_of(config, monkeypatch, logged, flags, precision, said):
    monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: flags)
    refused(config, precision=precision, prompts="/no/file.txt")
    assert any(line.startswith("WARNING precision is bf16") for line in logged) == said


def test_a_model_too_large_for_the_device_is_no_traceback(config, monkeypatch):
    """Weights, copies and moments come before any plan: it is said what they need, and what would save."""

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has …")

    monkeypatch.setattr("grpo.run.setup.make_optimizer", full)
    message = refused(config, model="rook-tiny")
    assert message.startswith(
        "the model does not fit on cpu: what stays all along needs 54 MB (weights 13 MB,"
    )
    assert "optimizer 27 MB, reference 13 MB), and of" in message and "others hold" in message
    assert "--lora-rank 16 saves" in message and "--kl-coef 0" in message
    assert message.endswith("(OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.)")
    assert not config.runs_dir.exists()


def test_a_completion_must_leave_room_for_a_prompt(config):
    sampling = dataclasses.replace(config.sampling, max_new_tokens=192)
    message = refused(config, sampling=sampling)
    assert "max_new_tokens is 192" in message and "context is 192 tokens: give less" in message


def test_a_run_is_not_started_over_another(config):
    with open_run(config) as run:
        pass
    with open_run(config) as run:  # nothing was learned yet, so nothing is lost
        Trainer(run, Console(quiet=True)).train(StopRequest())
    message = refused(config)
    assert "name is 'test'" in message and f"--resume {run.folder}" in message


def test_two_runs_do_not_train_in_one_folder(config):
    """The second is told who does, before its model is loaded; when that one ends, the folder is free."""
    with open_run(config) as run:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        message = refused(config, model="/no/such/model")
        assert message.startswith(f"name is 'test', but {who} is training in '{run.folder}'")
        assert "stop it, or choose another name" in message
        Trainer(run, Console(quiet=True)).train(StopRequest())
        message = refused(config, resume=run.folder, steps=9)
        assert (
            message.startswith(f"resume is '{run.folder}', but {who} is training") and "name" not in message
        )
    assert "is a run already" in refused(config)
    with open_run(dataclasses.replace(config, resume=run.folder, steps=5)):
        pass
    assert not (run.folder / LOCK_FILE).exists()


def test_a_folder_that_cannot_be_made_is_found_out_before_the_model_is_loaded(config, tmp_path):
    (tmp_path / "file").touch()
    for runs_dir, reason in ((tmp_path / "file", "Not a directory"), (Path("/proc/nope"), "No such file")):
        message = refused(config, model="/no/such/model", runs_dir=runs_dir)
        assert (
            message.startswith(f"runs_dir is '{runs_dir}', where a run cannot write (") and reason in message
        )
        assert message.endswith("give a folder in which others can be made.")
        assert refused(config, model="/no/such/model", runs_dir=runs_dir, name=None).startswith("runs_dir is")


def test_a_run_that_was_killed_holds_no_folder(config):
    """The file is left, the lock is not."""
    folder = config.runs_dir / "test"
    folder.mkdir(parents=True)
    (folder / LOCK_FILE).write_text("process 1 on another-machine, which is gone")
    with open_run(config):
        assert (folder / LOCK_FILE).read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_run_that_does_not_begin_leaves_the_folder_as_it_was(config):
    folder = config.runs_dir / "test"
    folder.mkdir(parents=True)
    refused(config, model="/no/such/model")
    assert list(folder.iterdir()) == []


def test_a_finished_run_goes_on_only_if_there_is_more_to_do(config, logged):
    """Nothing is loaded, and nothing written, before that is said."""
    config = dataclasses.replace(config, steps=2)
    with open_run(config) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
    before = (run.folder / CONFIG_FILE).read_text()
    for steps in (1, 2):
        message = refused(config, resume=run.folder, steps=steps, model="/no/such/model")
        assert message == f"steps is {steps}, but 2 steps are done: give --steps above 2."
    assert (run.folder / CONFIG_FILE).read_text() == before
    assert not any("changed from here on" in line for line in logged)


def test_what_is_changed_in_a_resumed_run_is_said(config, logged):
    config = dataclasses.replace(config, steps=2)
    with open_run(config) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
    resumed = dataclasses.replace(config, resume=run.folder, steps=3)
    with open_run(dataclasses.replace(resumed, batch_size=16, train_rows=2)):
        pass
    (said,) = [line for line in logged if "changed from here on" in line]
    assert said == (
        "INFO changed from here on: steps 2 -> 3, batch_size 8 -> 16, train_rows None -> 2, "
        "gradient_checkpointing none -> auto"
    )


def test_a_run_without_a_name_never_meets_another(config, tmp_path):
    """Not even one of the same second."""
    config = dataclasses.replace(config, name=None)
    folders = []
    for _ in range(3):
        with open_run(config) as run:
            folders.append(run.folder)
    assert len(set(folders)) == 3
    assert {folder.parent for folder in folders} == {config.runs_dir}


def test_the_yaml_of_a_run_repeats_it_and_does_not_resume_it(config):
    with open_run(config) as run:
        stored = from_flat(read_yaml(run.folder / CONFIG_FILE))
        assert stored == run.config == dataclasses.replace(config, gradient_checkpointing="none")  # was auto


def test_checkpointing_that_the_plan_came_to_is_checked(config, monkeypatch):
    """Memory is made up to be so short that nothing else fits."""

    def plan(world, work, *rest):
        short = dataclasses.replace(work.config, gradient_checkpointing="full")
        return plan_together(world, dataclasses.replace(work, config=short), *rest)

    checked = []
    monkeypatch.setattr("grpo.run.setup.plan_together", plan)
    monkeypatch.setattr("grpo.run.setup.check_recomputation", lambda model, kind: checked.append(kind))
    with open_run(config) as run:
        assert run.config.gradient_checkpointing == "full"
        Trainer(run, Console(quiet=True)).train(StopRequest())
    assert checked == ["full"]


def test_held_out_prompts_are_of_both_tasks_and_not_trained_on(config):
    with open_run(dataclasses.replace(config, eval_prompts=4)) as run:
        tasks = [prompt.task for prompt in run.eval_prompts]
        assert tasks == ["environment"] * 2 + ["policy"] * 2
        trained = {prompt.id for prompt in run.source.draw(100)}
        assert not trained & {prompt.id for prompt in run.eval_prompts}
        for task in ("environment", "policy"):
            hashes = sorted(heldout_fraction(prompt) for prompt in run.source.heldout if prompt.task == task)
            chosen = [heldout_fraction(prompt) for prompt in run.eval_prompts if prompt.task == task]
            assert len(hashes) > 2 and sorted(chosen) == hashes[:2]  # not the first of the file


def test_few_held_out_prompts_are_counted_and_none_is_a_warning(config, logged):
    def said(**changes):
        logged.clear()
        with open_run(dataclasses.replace(config, **changes)) as run:
            lines = [line for line in logged if "evaluat" in line]
            return len(run.eval_prompts), run.source.heldout, lines

    assert said()[2] == []
    count, heldout, (line,) = said(eval_prompts=50)
    few = Counter(prompt.task for prompt in heldout)
    assert 4 < count == few.total() < 50 and max(few.values()) < 25
    assert line.startswith(f"INFO held out are only {few['environment']} environment, {few['policy']} policy")
    assert line.endswith(f"evaluations use {count}, not the 50 of --eval-prompts")
    (line,) = said(heldout_share=0)[2]
    assert line.startswith(
        "WARNING nothing will be evaluated: --heldout-share 0 holds out no prompts; give more"
    )
    assert "--eval-prompts is 0; give more" in said(eval_prompts=0)[2][0]
    assert said(heldout_share=0, eval_interval=0)[2] == []


def test_a_reference_is_there_only_if_it_is_used(config):
    with open_run(config) as run, run.reference.model() as reference:
        assert reference is not run.policy.model
    loss = dataclasses.replace(config.loss, kl_coef=0.0)
    with open_run(dataclasses.replace(config, loss=loss, name="other")) as run:
        assert run.reference is None
