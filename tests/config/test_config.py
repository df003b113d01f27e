"""Settings in files, profiles, flags and resumed runs, and the help that is made of them.

What is refused stands in test_refusals.py.
"""

import dataclasses
import re
from pathlib import Path

import pytest
from commands import ROOT
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from grpo.config import (
    CONFIG_FILE,
    Config,
    SettingsError,
    from_plain,
    parse_command_line,
    read_yaml,
    to_plain,
    write_yaml,
)
from grpo.config.groups import LossSettings, SamplingSettings
from grpo.config.help import FIRST, sections, settings_page
from grpo.config.sizes import parse_size


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


# ---------------------------------------------------------------------------------------- single values


@given(st.integers(1, 400), st.integers(2, 40))
@examples(60)
def test_the_multiples_that_are_named_are_the_nearest(batch_size, group_size):
    values = {"batch_size": batch_size, "group_size": group_size}
    if batch_size % group_size == 0:
        assert from_plain(values).num_prompts == batch_size // group_size
        return
    with pytest.raises(SettingsError) as error:
        from_plain(values)
    below = batch_size - batch_size % group_size
    named = set(map(int, re.findall(r"\d+", str(error.value))))
    assert named == {batch_size, group_size, below, below + group_size} - {0}


def test_the_defaults_are_the_ones_people_know():
    """docs/settings.md tells the defaults of all, and a test below sees to it."""
    known = "--steps 100 --batch-size 64 --group-size 8 --learning-rate 1e-5 --clip-range 0.2 --kl-coef 0.02"
    assert parse_command_line([*known.split(), "--log-level", "INFO"]) == parse_command_line([]) == Config()


def test_the_batch_size_may_be_left_to_the_planner(tmp_path):
    config = parse_command_line(["--batch-size", "auto", "--max-batch-size", "100", "--group-size", "7"])
    assert config.batch_size == "auto"
    assert parse_command_line(["--config", yaml_file(tmp_path, "batch_size: auto")]).batch_size == "auto"
    with pytest.raises(ValueError, match="has not been found yet"):
        _ = config.num_rows
    found = dataclasses.replace(config, batch_size=98)
    assert (found.num_rows, found.num_prompts) == (98, 14)


def test_settings_are_those_of_their_groups_which_stand_alone_too():
    """Alone they need not keep the rules of the whole: evaluation is greedy, a coefficient adapts to 0."""
    config = Config(max_new_tokens=9, top_k=3, kl_in_reward=True)
    assert isinstance(config, SamplingSettings) and isinstance(config, LossSettings)
    assert SamplingSettings.of(config, temperature=0.0) == SamplingSettings(9, temperature=0.0, top_k=3)
    assert LossSettings.of(config, kl_coef=0.0) == LossSettings(kl_coef=0.0)
    assert config.uses_reference and not LossSettings(kl_coef=0.0).uses_reference
    for kind, wrong in (
        (Config, {"temperature": 0.0}),
        (Config, {"kl_coef": 0.0, "kl_in_reward": True}),
        (SamplingSettings, {"max_new_tokens": 0}),
    ):
        with pytest.raises(SettingsError, match=f"{next(iter(wrong))} is 0|kl_coef is 0"):
            kind.of(config, **wrong)


def test_values_are_what_their_settings_hold_wherever_they_come_from():
    long = "Think. " * 100  # which is no name of a file
    config = Config(learning_rate=1, reward="policy", runs_dir="a", model=Path("b/c"), system_prompt=long)
    assert config == from_plain(to_plain(config))
    assert isinstance(config.learning_rate, float) and (config.reward, config.model) == (("policy",), "b/c")


def test_the_home_is_meant_by_its_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert from_plain({"runs_dir": "~/mine", "resume": "~/old"}).runs_dir == tmp_path / "mine"
    assert from_plain({"runs_dir": "~nobody-is-called-so/mine"}).runs_dir == Path("~nobody-is-called-so/mine")


def test_a_size_is_read_as_people_write_it_and_what_is_none_is_refused():
    sizes = {
        "24GB": 24 * 2**30,
        "24 gib": 24 * 2**30,
        "1.5G": 3 * 2**29,
        "512MB": 2**29,
        ".5k": 512,
        "2TB": 2**41,
        "1048576": 2**20,
        " 7B ": 7,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "0", "0GB", "0.4", "-1GB", "24 G B", "24XB", "1e9", "nan", "24GBs", "24"):
        with pytest.raises(ValueError, match="is no size: write it like 24GB"):
            parse_size(text)
    config = parse_command_line(["--memory-limit", "24GB", "--dry-run", "--device-memory", "512 MB"])
    assert (config.memory_limit, config.device_memory, config.dry_run) == ("24GB", "512 MB", True)


# ---------------------------------------------------------------------------------------- YAML and flags


def test_yamls_own_traps(tmp_path):
    """To YAML 1e-5 is text, a bare off is false, digits are a number, and a single name is no list."""
    text = "learning_rate: 1e-5\nengine: off\nreward: policy\nkl_coef: 0\ntrackers: []\n"
    text += "memory_limit: 8000000000\nname: 20261121\n"
    config = parse_command_line(["--config", yaml_file(tmp_path, text)])
    assert config.learning_rate == 1e-5
    assert (config.engine, config.reward, config.trackers) == ("off", ("policy",), ())
    assert isinstance(config.kl_coef, float) and config.kl_coef == 0
    assert (config.memory_limit, config.name) == ("8000000000", "20261121")


ANY_SETTINGS = {
    "steps": st.integers(1, 10**6),
    "seed": st.integers(),
    "minutes": st.none() | st.floats(1e-6, 1e6),
    "learning_rate": st.floats(0, 1),
    "temperature": st.floats(1e-3, 10),
    "train_rows": st.none() | st.sampled_from([1, 2, 4]) | st.integers(1, 2**20).map(lambda n: 8 * n),
    "model": st.text(st.characters(codec="utf-8"), min_size=1, max_size=60),
    "trailing_space": st.booleans(),
    "advantage_scale": st.sampled_from(["group", "batch", "none"]),
    "reward": st.sampled_from([["policy"], ["policy", "a b.py:f"]]),
    "reward_weights": st.sampled_from([[], [1.0, 1e-7]]),
    "trackers": st.sampled_from([[], ["tensorboard", "wandb"]]),
    "runs_dir": st.sampled_from(["runs", "/a b/c"]),
    "stockfish_path": st.sampled_from(["/opt/off", "off"]),
    "engine": st.sampled_from(["auto", "off"]),
    "name": st.none() | st.sampled_from(["null", "1", "on", "~"]),
}


@given(st.fixed_dictionaries({}, optional=ANY_SETTINGS))
@examples(40)
def test_any_settings_survive_yaml(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    write_yaml(from_plain(values), path)
    assert parse_command_line(["--config", str(path)]) == from_plain(read_yaml(path)) == from_plain(values)


# -------------------------------------------------------------------------------- profiles, resumed runs

PROFILES = """
steps: 7
batch_size: 32
profiles:
  h100_single: {batch_size: 64}
  h100_quad:
    batch_size: 256
    learning_rate: 3.0e-5
  24gb_single:
"""


def test_a_file_and_a_profile_over_what_it_shares_set_defaults_that_flags_override(tmp_path):
    file = yaml_file(tmp_path, PROFILES)
    for arguments, *expected in (
        (["--config", file, "--profile", "h100_quad", "--steps", "9"], 9, 256, 3e-5),
        (["--steps=9", "--profile=h100_quad", f"--config={file}"], 9, 256, 3e-5),
        (["--config", file, "--profile", "h100_quad", "--batch-size", "8"], 7, 8, 3e-5),
        (["--config", file, "--profile", "24gb_single"], 7, 32, 1e-5),  # only what is shared
    ):
        config = parse_command_line(arguments)
        assert [config.steps, config.batch_size, config.learning_rate] == expected
    plain = yaml_file(tmp_path, "steps: 7\nbatch_size: 32\n")
    assert parse_command_line(["--steps", "9", "--config", plain]) == Config(steps=9, batch_size=32)


def test_a_resumed_run_has_its_own_settings_and_name_as_defaults_under_a_profile_and_flags(tmp_path):
    run = tmp_path / "a"
    run.mkdir()
    write_yaml(Config(steps=7, batch_size=16, name="once-elsewhere"), run / CONFIG_FILE)  # and moved since
    config = parse_command_line(["--resume", str(run), "--steps", "9"])
    assert config == Config(resume=run, steps=9, batch_size=16, name="once-elsewhere")
    assert parse_command_line([f"--resume={run}", "--name", "a"]).resume == run
    words = ["--config", yaml_file(tmp_path, PROFILES), "--profile", "h100_single"]
    config = parse_command_line(["--resume", str(run), *words])
    assert config == Config(resume=run, name="once-elsewhere", steps=7, batch_size=64)
    with pytest.raises(SettingsError, match=r"name is 'b', but resume is .*: leave --name out"):
        parse_command_line(["--resume", str(run), "--name", "b"])


def test_settings_of_an_older_version_are_read(logged):
    """Its third kind of checkpointing is gone."""
    assert from_plain({"gradient_checkpointing": "selective"}).gradient_checkpointing == "auto"
    assert [line for line in logged if "no longer known" in line]


# -------------------------------------------------------------------------------------------------- help


def test_every_setting_is_there_once_in_one_section_with_a_line_of_help(capsys):
    """Groups must not have names in common; what people need first comes first."""
    names = [field.name for group in reversed(Config.__bases__) for field in dataclasses.fields(group)]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    found = [setting for members in sections().values() for setting in members]
    assert sorted(names) == sorted({*names}) and list(to_plain(Config())) == names and names[0] == "steps"
    assert sorted(flags) == sorted(flag for flag, *_ in found)
    assert all(len(text) > 10 for *_, text in found)
    with pytest.raises(SystemExit) as ended:
        parse_command_line(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and max(map(len, shown.splitlines())) <= 100
    listed = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert sorted(listed) == sorted(flags)
    assert listed[: len(FIRST)] == [f"--{name.replace('_', '-')}" for name in FIRST]
    assert "Longest completion in tokens" in shown and "\nAdapters (LoRA)\n" in shown
    assert "One of auto, fp32, bf16, fp16, fp64. [auto]" in " ".join(shown.split())


def test_the_page_is_as_it_is_made():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings_page(), "python scripts/settings_page.py"
