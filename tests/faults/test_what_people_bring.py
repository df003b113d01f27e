"""Inputs that people bring, as they have them: each was a traceback, or wrong in silence, in somebody's
trainer.
"""

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from commands import ROOT
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedTokenizerFast,
)
from whole_runs import train

from grpo.commands import _speak_utf8
from grpo.commands.trl import parse
from grpo.config import Config, SettingsError, read_yaml
from grpo.config.reading import from_plain
from grpo.data import PromptBudget, load_prompts
from grpo.data.reward_calls import _plain
from grpo.files import as_path, replace_folder
from grpo.logs.model_card import model_card
from grpo.logs.progress import Progress
from grpo.logs.tracking import COMPLETIONS_FILE, METRICS_FILE, RunTracker
from grpo.model.load import load_policy
from grpo.model.names import source_of
from grpo.rollout.decoder import check_decoder, choose_decoder
from grpo.run.interrupt import stop_on_signal
from grpo.scoring.model_checks import check_scorer
from rewards.analysis import AnalysisCache
from rewards.engine import EngineError, EnginePool

CPU = torch.device("cpu")
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def room(template: str) -> PromptBudget:
    letters = {"<eos>": 0, "?": 1, **{chr(i): i for i in range(32, 127) if chr(i) != "?"}}
    made = Tokenizer(models.WordLevel(letters, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", chat_template=template)
    return PromptBudget(tokenizer, 500, 10)


# ------------------------------------------------------------------------------------ prompts

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "Let me think. <think>"}]


def prompts(rows, template=CHAT, **options):
    return load_prompts(rows, seed=0, heldout_share=0.0, room=room(template), **options).draw(1)


def test_a_conversation_that_ends_in_the_assistants_words_goes_on_with_them():
    (prompt,) = prompts([{"prompt": TALK}])
    assert prompt.text == "<user>2 + 2?<end><assistant>Let me think. <think>"
    (prompt,) = prompts([{"prompt": TALK[:1]}])
    assert prompt.text == "<user>2 + 2?<end><assistant>"


@pytest.mark.parametrize(
    ("message", "template", "reason"),
    [
        ({"role": "assistant", "content": ""}, CHAT, "has no text to go on from"),
        (TALK[1], CHAT.replace("{{ m.content }}", "{{ m.content.split('.')[0] }}"), "assistant's message"),
    ],
)
def test_an_answer_that_cannot_be_gone_on_with_is_refused(message, template, reason):
    with pytest.raises(ValueError, match="cannot be used") as refused:
        prompts([{"prompt": [TALK[0], message]}], template)
    assert reason in str(refused.value) or "message" in str(refused.value)


def test_a_template_that_tells_the_date_makes_no_other_prompts_of_the_next_day():
    """A resumed run goes on with the same rows and holds out the same, whatever day it is."""
    template = "Today is {{ strftime_now('%d %b %Y') }}. " + CHAT
    rows = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(60)]

    def source(today: str):
        with mock.patch("transformers.utils.chat_template_utils.datetime") as clock:
            clock.now.return_value.strftime = lambda _: today
            return load_prompts(rows, seed=0, heldout_share=0.3, room=room(template))

    one, other = source("28 Nov 2026"), source("29 Nov 2026")
    assert "28 Nov" in one.draw(1)[0].text and "29 Nov" in other.draw(1)[0].text
    assert one.state() == other.state()
    assert [each.id for each in one.heldout] == [each.id for each in other.heldout]


@pytest.mark.parametrize("separator, name", [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_a_table_with_other_separators_says_which(tmp_path, separator, name):
    file = tmp_path / "p.csv"
    file.write_text(f"prompt{separator}answer\nSay hello.{separator}hello\n")
    with pytest.raises(ValueError, match=rf"has {name} between its fields, where commas belong"):
        load_prompts(str(file), seed=0)


def test_plain_lines_are_told_in_which_files_prompts_are_taken(tmp_path):
    (tmp_path / "p.txt").write_text("What is 2 + 2?\nName a colour.\n")
    with pytest.raises(ValueError, match=r"a \.jsonl, \.csv or \.parquet file with a column `prompt`"):
        load_prompts(str(tmp_path / "p.txt"), seed=0)


def test_a_column_that_needs_another_package_is_named():
    def rows():
        yield {"prompt": "Say a."}
        raise ImportError("To support decoding audio data, please install 'torchcodec'.")

    with pytest.raises(ValueError, match=r"cannot be read \(To support.*'torchcodec'.*remove_columns"):
        load_prompts(rows(), seed=0)


# ----------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "text",
    [
        "steps: 1\nlearning_rate: 1e-5\nkl_coef: 0\nlearning_rate: 1e-2\n",
        "profiles:\n  a:\n    learning_rate: 1\n    'learning_rate': 2\n",
    ],
)
def test_a_key_that_stands_twice_is_an_error(tmp_path, text):
    (file := tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SettingsError, match=r"line 4: 'learning_rate' stands twice"):
        read_yaml(file)


def test_a_key_that_stands_twice_in_trls_file_is_an_error(tmp_path):
    (file := tmp_path / "grpo.yaml").write_text("beta: 0.0\nlearning_rate: 1e-5\nbeta: 0.1\n")
    with pytest.raises(SettingsError, match="'beta' stands twice"):
        parse(["--config", str(file)])


def test_a_key_may_replace_what_is_merged_in(tmp_path):
    (file := tmp_path / "c.yaml").write_text(
        "profiles:\n  a: &a\n    steps: 1\n  b:\n    <<: *a\n    steps: 2\n"
    )
    assert read_yaml(file)["profiles"]["b"] == {"steps": 2}


def test_variables_in_yaml_are_those_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINE", "data")
    config = from_plain({"runs_dir": "$HOME/my-runs", "chat_template": "~/${MINE}/t.jinja"})
    assert config.runs_dir == tmp_path / "my-runs" and config.chat_template == tmp_path / "data" / "t.jinja"
    assert as_path("$HOME/p.jsonl") == tmp_path / "p.jsonl"
    assert source_of("$HOME/none") == "$HOME/none"
    (tmp_path / "config.json").write_text("{}")
    assert source_of("$HOME") == source_of("~") == str(tmp_path)
    with pytest.raises(SettingsError, match=r"runs_dir .* no such variable in the environment"):
        from_plain({"runs_dir": "$NOBODY_HAS_SET_THIS/runs"})
    assert Config(system_prompt="$5").system_prompt == "$5"


@pytest.mark.parametrize(("encoding", "restarts"), [("ascii", True), ("utf-8", False)])
def test_in_a_locale_of_ascii_alone_python_starts_again_in_utf_8(monkeypatch, encoding, restarts):
    started = []
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    with mock.patch.dict(os.environ):
        os.environ.pop("PYTHONUTF8", None)
        _speak_utf8()
        assert (os.environ.get("PYTHONUTF8") == "1") == restarts == bool(started)
        _speak_utf8()  # once, whatever comes of it
        assert len(started) == restarts


# --------------------------------------------------------------------------------------- logs


def test_what_is_logged_is_json_and_a_number_stays_one(tmp_path):
    brought = np.float32(0.5), torch.tensor(2), np.array([3]), "x", None, True
    assert [_plain(value) for value in brought] == [0.5, 2, 3, "x", None, True]
    assert _plain(np.zeros(2)) == "[0. 0.]" and math.isnan(_plain(np.float64("nan")))

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    tracker = RunTracker(tmp_path, trackers=(), settings={})
    tracker.log(1, {"loss": math.inf, "kl": 0.5})
    tracker.log_completions(1, [{"extra": {"similarity": math.nan, "list": [math.inf, 1.0]}, "reward": 1.0}])
    tracker.close()
    metrics, completions = (
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)
        for name in (METRICS_FILE, COMPLETIONS_FILE)
    )
    assert metrics == {"step": 1, "loss": None, "kl": 0.5}
    assert completions["extra"] == {"similarity": None, "list": [None, 1.0]}


@pytest.mark.parametrize(
    ("environment", "project", "name"),
    [
        ({}, "grpo-lean", None),
        ({"WANDB_PROJECT": "my-team", "WANDB_NAME": "first", "WANDB_RUN_ID": "abc"}, "my-team", "first"),
    ],
)
def test_the_environment_names_the_project_as_wandb_has_it(tmp_path, environment, project, name, monkeypatch):
    noted = {}
    run = SimpleNamespace(log=None, finish=lambda: None)
    fake = SimpleNamespace(init=lambda **options: noted.update(options) or run, Table=None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with mock.patch.dict(os.environ, environment):
        RunTracker(tmp_path, trackers=("wandb",), settings={}).close()
    assert noted["project"] == project and noted["name"] == (name or tmp_path.name)
    assert environment.get("WANDB_RUN_ID") in (None, noted["id"])


# ------------------------------------------------------------------------------------- engine

BROKEN_ENGINE = """#!{python}
import sys
for line in sys.stdin:
    word = line.split()[:1]
    if word == ["uci"]:
        print("id name Fake 16")
        for option in ("Threads", "Hash", "MultiPV"):
            print(f"option name {{option}} type spin default 1 min 1 max 64")
        print("uciok", flush=True)
    elif word == ["isready"]:
        print("readyok", flush=True)
    elif word == ["go"]:
        print("info string NNUE evaluation")
        print("info string ERROR: The network file nn-0000.nnue was not loaded.", flush=True)
        sys.exit(1)
"""


def test_what_an_engine_says_of_itself_is_handed_on(tmp_path):
    engine = tmp_path / "engine"
    engine.write_text(BROKEN_ENGINE.format(python=sys.executable))
    engine.chmod(0o755)
    says = r"it said: ERROR: The network file nn-0000\.nnue was not loaded"
    with EnginePool(str(engine), cache_path=":memory:") as pool, pytest.raises(EngineError, match=says):
        pool.analyse(["8/8/8/3k4/8/3K4/8/7R w - - 0 1"])


def test_where_nobody_has_a_home_analyses_are_kept_for_this_process(monkeypatch, logged):
    def refuse(*_: object) -> str:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("rewards.analysis.platformdirs.user_cache_dir", refuse)
    cache = AnalysisCache(None)
    assert cache.get("nothing") is None and "analyses will not be kept" in logged[-1]
    cache.close()


# ------------------------------------------------------------------------------------- the run


def test_a_run_in_another_thread_trains_and_signals_stay_what_they_are():
    found = []

    def work() -> None:
        with stop_on_signal() as stop:
            found.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_minutes_without_end_are_no_limit():
    clock = iter(range(100))
    progress = Progress(10, math.inf, now=lambda: float(next(clock)))
    progress.begin()
    assert [progress.forecast(step) for step in range(1, 6)] == [None] * 5
    assert progress.share(5) == 0.5 and progress.of_steps == " of 10"
    assert progress.ended(10, 1.0) == "done after 10 steps"


# ------------------------------------------------------------------------------------- models


def test_a_head_that_caps_its_logits_otherwise_is_refused_while_they_are_small():
    """A cap does not show in fresh weights; as the model learns it would. Here the model has none."""
    torch.manual_seed(0)
    capped = LlamaForCausalLM(LlamaConfig(**TINY, final_logit_softcapping=15.0)).eval()
    check_scorer(NanoChatForCausalLM(NanoChatConfig(**TINY)).eval(), 128)
    with pytest.raises(ValueError, match="its head or its attention is of a kind that is not supported"):
        check_scorer(capped, 128)
    plain = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    before = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    check_scorer(plain, 128)
    assert all(torch.equal(before[name], parameter) for name, parameter in plain.named_parameters())


def test_the_saved_configuration_is_the_one_the_model_came_with(config, tmp_path, model_folders):
    """Dropout is what whoever trains it further would have; that of adapters' merged models, too."""
    shape = json.loads((model_folders["gpt2"] / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(model_folders["gpt2"])
    model.config.resid_pdrop, model.config.activation_function = 0.1, "gelu_new"
    model.save_pretrained(tmp_path / "m")
    for file in model_folders["gpt2"].glob("tokenizer*"):
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    for name, more in (("whole", {}), ("merged", {"lora_rank": 2, "lora_merge": True})):
        run = train(replace(config, model=str(tmp_path / "m"), name=name, steps=1, **more))
        found = json.loads(next(run.glob("model/**/config.json")).read_text())
        assert (found["resid_pdrop"], found["activation_function"]) == (0.1, "gelu_new")
        unlike = {key for key in shape if found.get(key) != shape[key]}
        assert unlike <= {"resid_pdrop", "activation_function", "transformers_version", "dtype"}


@pytest.mark.parametrize("scale", ["logit_scale", "logits_scaling"])
def test_a_head_with_a_factor_is_refused_though_its_logits_are_small(scale):
    torch.manual_seed(0)
    config = LlamaConfig(**TINY, **{scale: 2.0})  # which a Llama does not mind
    with pytest.raises(ValueError, match="its head or its attention is of a kind that is not supported"):
        check_scorer(AutoModelForCausalLM.from_config(config).eval(), 128)


def test_no_decoder_is_chosen_where_a_configuration_asks_for_what_the_model_does_not_do(logged):
    """A Llama does not mind a cap of its logits: the drop-in leaves the sampling of it to TRL."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, final_logit_softcapping=15.0)).eval()
    wrong = choose_decoder(model)
    assert wrong is not None and "nats wrong" in wrong
    with pytest.raises(ValueError, match="cannot be sampled from here: its log-probs come out"):
        check_decoder(model)


@pytest.mark.parametrize(
    "adapters",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
    ids=str,
)
def test_adapters_of_tied_embeddings_are_loaded_as_peft_loads_them(tmp_path, adapters):
    torch.manual_seed(0)
    sizes = {**TINY, "initializer_range": 0.2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "base")
    room(CHAT).tokenizer.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **adapters))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "adapters")
    ids = torch.randint(64, (2, 8))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(again, tmp_path / "adapters").eval()
    ours = load_policy(str(tmp_path / "adapters"), CPU, "fp32").model
    ours.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = theirs(ids).logits
        for model in (ours, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)


def test_a_card_that_cannot_be_written_ends_no_run_and_names_no_folder(config, tmp_path, logged):
    """An edited settings file, and a line of somebody else's in the metrics."""
    reward = "def short(completions, **_):\n    return [-float(len(t)) for t in completions]\n"
    (tmp_path / "mine.py").write_text(reward)
    folder = train(replace(config, reward=(f"{tmp_path}/mine.py:short",), steps=1))
    card = (folder / "model" / "README.md").read_text()
    assert "mine.py:short" in card and str(tmp_path) not in card
    with (folder / METRICS_FILE).open("a") as file:
        file.write(json.dumps({"another": "program"}) + "\n")
    assert "# test" in model_card(folder)

    def edited(*_: object) -> None:
        (folder / "config.yaml").write_text("steps: [1\n")

    resumed = replace(config, reward=(f"{tmp_path}/mine.py:short",), resume=folder, name=None, steps=2)
    with mock.patch(
        "grpo.run.checkpoint.replace_folder", lambda new, place: edited() or replace_folder(new, place)
    ):
        train(resumed)
    assert (folder / "model" / "config.json").is_file()
    assert sum("has no card" in line for line in logged) == 1


def test_importing_us_leaves_the_stacks_of_threads_alone():
    """A recursion in somebody's thread would else be a crash instead of an error."""
    code = "import threading; from grpo import Trainer; assert threading.stack_size() == 0"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_drop_in_sets_what_its_command_sets():
    code = "import grpo.trl, os; assert 'expandable_segments:True' in os.environ['PYTORCH_ALLOC_CONF']"
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
