import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.config import (
    CONFIG_FILE,
    Config,
    SettingsError,
    from_flat,
    parse_command_line,
    read_yaml,
    to_flat,
    write_yaml,
)
from grpo.config.groups import OptimizerSettings, SamplingSettings
from grpo.learning.loss import LossSettings


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


def refusal(capsys, *arguments: str) -> str:
    """What the command line says to settings it refuses, on one line."""
    try:
        with pytest.raises(SystemExit) as ended:
            parse_command_line(arguments)
    except SettingsError as error:
        return str(error)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return " ".join(captured.err.replace("│", " ").split())


# ------------------------------------------------------------------------------------ wrong settings

WRONG = [  # setting, value, what the message says besides the two
    ("steps", 0, "at least 1"),
    ("batch_size", 0, "at least 1"),
    ("batch_size", 60, "56 and 64"),
    ("batch_size", 4, "less than one group of 8"),
    ("group_size", 1, "at least 2"),
    ("num_iterations", 0, "at least 1"),
    ("num_engines", 0, "at least 1"),
    ("engine_depth", 0, "at least 1"),
    ("keep_checkpoints", 0, "at least 1"),
    ("eval_interval", -1, "0 or more"),
    ("eval_prompts", -1, "0 or more"),
    ("checkpoint_interval", -1, "0 or more"),
    ("logged_completions", -1, "0 or more"),
    ("refill_groups", -1, "0 or more"),
    ("rollout_rows", 0, "at least 1, or leave it out"),
    ("score_rows", 0, "at least 1, or leave it out"),
    ("train_rows", -3, "at least 1, or leave it out"),
    ("rollout_rows", 12, "8 and 16"),
    ("score_rows", 3, "give 1, 2, 4, or a multiple of 8"),
    ("train_rows", 20, "16 and 24"),
    ("train_rows", 6, "give 1, 2, 4, or a multiple of 8"),
    ("max_batch_size", 7, "less than one group of 8"),
    ("memory_utilization", 0.0, "above 0 and up to 1"),
    ("memory_utilization", 1.1, "above 0 and up to 1"),
    ("policy_share", 1.5, "between 0 and 1"),
    ("heldout_share", -0.1, "between 0 and 1"),
    ("max_bad_share", math.nan, "between 0 and 1"),
    ("minutes", 0.0, "more than 0, or leave it out"),
    ("importance_cap", -1.0, "more than 0, or leave it out"),
    ("kl_target", math.nan, "more than 0, or leave it out"),
    ("temperature", 0.0, "more than 0"),
    ("temperature", -1.0, "0 (greedy) or more"),
    ("max_new_tokens", 0, "at least 1"),
    ("top_k", -1, "0 (all tokens) or more"),
    ("top_p", 0.0, "more than 0"),
    ("learning_rate", -1e-5, "0 or more"),
    ("warmup_steps", -1, "0 or more"),
    ("min_lr_ratio", 2.0, "between 0 and 1"),
    ("adam_beta2", 1.0, "less than 1"),
    ("weight_decay", -1.0, "0 or more"),
    ("max_grad_norm", -1.0, "0 or more"),
    ("clip_range", 0.0, "between 0 and 1"),
    ("clip_range_high", 0.0, "above 0"),
    ("dual_clip", 1.0, "above the upper clip"),
    ("kl_coef", -0.1, "0 or more"),
]


@pytest.mark.parametrize(("name", "value", "remedy"), WRONG, ids=[f"{n}={v}" for n, v, _ in WRONG])
def test_a_wrong_setting_is_named_with_its_value_and_a_remedy(capsys, name, value, remedy):
    """As a flag, and in a YAML file."""
    from_flag = refusal(capsys, f"--{name.replace('_', '-')}", str(value))
    with pytest.raises(SettingsError) as error:
        from_flat({name: value})
    for message in (from_flag, str(error.value)):
        assert f"{name} is {f'{value:g}'.split('e')[0]}" in message
        assert remedy in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward": []}, "reward is empty: give at least one"),
        ({"name": ""}, "name is '', which is no name of one folder: give one without"),
        ({"name": "../escape"}, r"name is '\.\./escape', which is no name .*--runs-dir for where"),
        ({"name": "a/b"}, "name is 'a/b', which is no name"),
        ({"name": ".."}, r"name is '\.\.', which is no name"),
        ({"reward": ["a.py:f", "b.py:f"]}, "reward names f, f are not distinct: rename one"),
        ({"reward_weights": [1.0, math.nan]}, r"reward_weights is \[1.0, nan\]: give finite numbers"),
        ({"kl_target": 0.1, "kl_coef": 0.0}, "kl_target needs .*: give kl_coef more than 0"),
        ({"loss_type": "cispo", "dual_clip": 3.0}, "dual_clip has no meaning for cispo.*leave it out"),
        ({"loss_type": "cispo", "clip_range_high": 0.5}, "clip_range_high is 0.5; .*Give 1 or more"),
    ],
)
def test_settings_that_do_not_go_together(values, message):
    with pytest.raises(SettingsError, match=message):
        from_flat(values)


def test_60_rows_in_groups_of_8_name_56_and_64(capsys):
    message = refusal(capsys, "--batch-size", "60")
    assert "batch_size is 60, which is not a multiple of group_size 8" in message
    assert "56 and 64" in message


@given(st.integers(1, 400), st.integers(2, 40))
@settings(deadline=None)
def test_the_multiples_that_are_named_are_the_nearest(batch_size, group_size):
    values = {"batch_size": batch_size, "group_size": group_size}
    if batch_size % group_size == 0:
        assert from_flat(values).num_prompts == batch_size // group_size
        return
    with pytest.raises(SettingsError) as error:
        from_flat(values)
    below = batch_size - batch_size % group_size
    named = set(map(int, re.findall(r"\d+", str(error.value))))
    assert named == {batch_size, group_size, below, below + group_size} - {0}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("steps", "many", "int"), ("steps", 1.5, "int"), ("steps", True, "int"), ("steps", None, "int"),
        ("learning_rate", "fast", "float"), ("learning_rate", True, "float"), ("trailing_space", 1, "bool"),
        ("model", [3], "str"), ("runs_dir", 3, "Path"), ("train_rows", "all", "int"),
        ("reward_weights", [1.0, "two"], "float"), ("reward", [True], "str"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_in_yaml(name, value, wanted):
    with pytest.raises(SettingsError, match=f"^{name} is .*: give a value of type {wanted}"):
        from_flat({name: value})


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("loss_type", "grpo, dapo, dr_grpo, cispo"), ("lr_schedule", "constant, cosine, linear"),
        ("advantage_scale", "group, batch, none"), ("precision", "auto, fp32, bf16, fp64"),
        ("engine", "auto, off"), ("log_level", "DEBUG, INFO, WARNING, ERROR"),
        ("trackers", "tensorboard, wandb"), ("importance_level", "token, sequence"),
        ("kl_estimator", "k3, k2"),
    ],
)  # fmt: skip
def test_a_choice_that_is_none_names_the_choices(capsys, name, choices):
    with pytest.raises(SettingsError, match=f"^{name} is 'fancy': give one of {choices}"):
        from_flat({name: "fancy"})
    message = refusal(capsys, f"--{name.replace('_', '-')}", "fancy")
    assert "fancy" in message and all(repr(choice) in message for choice in choices.split(", "))


# ---------------------------------------------------------------------------------------- YAML, flags


def test_a_file_sets_defaults_that_flags_override(tmp_path):
    file = yaml_file(tmp_path, "steps: 7\nlearning_rate: 3.0e-5\nbatch_size: 32\n")
    for arguments in (
        ["--config", file, "--steps", "9"],
        ["--steps", "9", "--config", file],
        ["--steps=9", f"--config={file}"],
    ):
        config = parse_command_line(arguments)
        assert (config.steps, config.optimizer.learning_rate, config.batch_size) == (9, 3e-5, 32)
        assert config.group_size == 8  # and the rest stays


def test_yamls_own_traps(tmp_path):
    """To YAML 1e-5 is text, a bare off is false, and a single name is no list."""
    text = "learning_rate: 1e-5\nengine: off\nreward: policy\nkl_coef: 0\ntrackers: []\n"
    config = parse_command_line(["--config", yaml_file(tmp_path, text)])
    assert config.optimizer.learning_rate == 1e-5
    assert config.engine == "off"
    assert config.reward == ("policy",)
    assert isinstance(config.loss.kl_coef, float) and config.loss.kl_coef == 0
    assert config.trackers == ()


def test_what_is_written_reads_back_the_same(tmp_path):
    config = Config(
        steps=3, reward=("policy", "a b.py:f"), reward_weights=(1.0, 1e-7), minutes=2.5, engine="off",
        runs_dir=tmp_path / "a", name="123", trackers=(), stockfish_path="/opt/off",
        sampling=SamplingSettings(top_p=0.9), loss=LossSettings("cispo", clip_range_high=4.0),
        optimizer=OptimizerSettings(learning_rate=1e-7, lr_schedule="cosine"),
    )  # fmt: skip
    write_yaml(config, tmp_path / "c.yaml")
    assert parse_command_line(["--config", str(tmp_path / "c.yaml")]) == config
    assert from_flat(read_yaml(tmp_path / "c.yaml")) == config


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
    "name": st.none() | st.sampled_from(["null", "1", "on", "~"]),
}


@given(st.fixed_dictionaries({}, optional=ANY_SETTINGS))
@settings(deadline=None, max_examples=60)
def test_any_settings_survive_yaml(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    write_yaml(from_flat(values), path)
    assert from_flat(read_yaml(path)) == from_flat(values)


def test_every_setting_is_there_once_with_a_line_of_help(capsys):
    """Names are flat, so those of the parts must not meet; each is a flag with its doc."""
    parts = [f for f in dataclasses.fields(Config) if dataclasses.is_dataclass(getattr(Config(), f.name))]
    names = [f.name for f in dataclasses.fields(Config) if f not in parts]
    names += [f.name for part in parts for f in dataclasses.fields(getattr(Config(), part.name))]
    assert len(names) == len(set(names))
    assert set(to_flat(Config())) == set(names)
    with pytest.raises(SystemExit) as ended:
        parse_command_line(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        assert flag in shown
    assert "Longest completion in tokens" in shown and "Completions a step sees" in shown


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("learning_rte", "learning_rate"), ("batchsize", "batch_size"), ("kl-coef", "kl_coef")],
)
def test_an_unknown_setting_in_yaml_suggests_the_near_one(typed, meant):
    with pytest.raises(SettingsError, match=rf"there is no setting '{typed}'; did you mean '{meant}'\?"):
        from_flat({typed: 1})


def test_an_unknown_flag_suggests_the_near_one(capsys):
    assert "--batch-size" in refusal(capsys, "--bach-size", "64")


def test_an_unknown_setting_that_is_near_to_none_lists_them_all():
    with pytest.raises(SettingsError, match=r"no setting 'xyzzy': docs/settings\.md and --help name"):
        from_flat({"xyzzy": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no settings"),
        ("- 1\n", "holds no settings"),
        ("a: [", "cannot be read"),
        ("!!python/name:os.x", "cannot be read"),
    ],
)
def test_a_file_that_is_no_settings_file(tmp_path, text, message):
    file = yaml_file(tmp_path, text)
    with pytest.raises(SettingsError, match=message) as error:
        read_yaml(Path(file))
    assert file in str(error.value)


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path):
    with pytest.raises(SettingsError, match=r"no\.yaml' does not exist"):
        parse_command_line(["--config", str(tmp_path / "no.yaml")])
    with pytest.raises(SettingsError, match="cannot be read"):
        parse_command_line(["--config", str(tmp_path)])


# ----------------------------------------------------------------------------------------- profiles

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


def test_a_profile_is_what_it_says_over_what_the_file_shares_under_the_flags(tmp_path):
    file = yaml_file(tmp_path, PROFILES)
    for arguments in (
        ["--config", file, "--profile", "h100_quad", "--steps", "9"],
        ["--steps", "9", "--profile=h100_quad", f"--config={file}"],
    ):
        config = parse_command_line(arguments)
        assert (config.steps, config.batch_size, config.optimizer.learning_rate) == (9, 256, 3e-5)
    config = parse_command_line(["--config", file, "--profile", "24gb_single"])  # only what is shared
    assert (config.steps, config.batch_size, config.optimizer.learning_rate) == (7, 32, 1e-5)
    config = parse_command_line(["--config", file, "--profile", "h100_quad", "--batch-size", "8"])
    assert (config.steps, config.batch_size) == (7, 8)


def test_a_resumed_run_may_take_a_profile(tmp_path):
    write_yaml(Config(steps=3, name="x"), tmp_path / CONFIG_FILE)
    file = yaml_file(tmp_path, PROFILES)
    config = parse_command_line(["--resume", str(tmp_path), "--config", file, "--profile", "h100_single"])
    assert (config.resume, config.name, config.steps, config.batch_size) == (tmp_path, "x", 7, 64)


@pytest.mark.parametrize(
    ("text", "profile", "message"),
    [
        (PROFILES, "h100_quat", r"profile is 'h100_quat', .*settings\.yaml': Did you mean 'h100_quad'\? "
         "There are h100_single, h100_quad, 24gb_single"),
        (PROFILES, "mine", r"profile is 'mine', .*settings\.yaml': There are h100_single"),
        (PROFILES, None, "holds profiles: choose one with --profile, of h100_single, h100_quad, 24gb_single"),
        ("steps: 7", "h100_quad", "profile is 'h100_quad', but .*settings.yaml' has none: leave it out, or"),
        ("profiles:", "x", "are no named settings: write a name below"),
        ("profiles: [a, b]", "a", "are no named settings: write a name below"),
        ("profiles: {batch_size: 64}", None, "are no named settings: write a name below"),
        ("profiles: {a: {bach_size: 64}}", "a", "there is no setting 'bach_size'; did you mean 'batch_size'"),
        ("profiles: {a: {batch_size: 60}}", "a", "batch_size is 60, .* 56 and 64"),
    ],
)  # fmt: skip
def test_a_profile_that_cannot_be_is_named_with_those_there_are(tmp_path, text, profile, message):
    chosen = [] if profile is None else ["--profile", profile]
    with pytest.raises(SettingsError, match=message):
        parse_command_line(["--config", yaml_file(tmp_path, text), *chosen])


def test_a_profile_needs_a_file():
    with pytest.raises(SettingsError, match=r"profile is 'h100_quad', .*: add --config FILE\.yaml"):
        parse_command_line(["--profile", "h100_quad"])


# ------------------------------------------------------------------------------------------- resume


def test_a_resumed_run_has_its_own_settings_as_defaults(tmp_path):
    write_yaml(Config(steps=7, batch_size=16, name="x"), tmp_path / CONFIG_FILE)
    config = parse_command_line(["--resume", str(tmp_path), "--steps", "9"])
    assert (config.resume, config.steps, config.batch_size, config.name) == (tmp_path, 9, 16, "x")
    assert parse_command_line([f"--resume={tmp_path}"]).resume == tmp_path


def test_a_resumed_run_keeps_its_name(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    write_yaml(Config(name="once-elsewhere"), folder / CONFIG_FILE)  # and moved since
    assert parse_command_line(["--resume", str(folder), "--name", "a"]).resume == folder
    with pytest.raises(SettingsError, match=r"name is 'b', but resume is .*; leave --name out"):
        parse_command_line(["--resume", str(folder), "--name", "b"])


def test_text_that_yaml_takes_for_a_number_is_text(tmp_path):
    (tmp_path / "c.yaml").write_text("memory_limit: 8000000000\nname: 20261121\n")
    config = parse_command_line(["--config", str(tmp_path / "c.yaml")])
    assert (config.memory_limit, config.name) == ("8000000000", "20261121")


def test_resuming_what_is_no_run_folder(tmp_path):
    with pytest.raises(SettingsError, match=r"resume is '.*', which is no run folder: give one that"):
        parse_command_line(["--resume", str(tmp_path)])


def test_the_defaults_are_the_ones_people_know():
    config = parse_command_line([])
    assert (config.steps, config.batch_size, config.group_size) == (100, 64, 8)
    assert config.optimizer.learning_rate == 1e-5
    assert (config.loss.loss_type, config.loss.clip_range, config.loss.kl_coef) == ("dapo", 0.2, 0.02)
    assert (config.sampling.max_new_tokens, config.sampling.temperature) == (144, 1.0)
    known = "--steps 100 --batch-size 64 --group-size 8 --learning-rate 1e-5 --clip-range 0.2 --kl-coef 0.02"
    assert parse_command_line([*known.split(), "--log-level", "INFO"]) == config == Config()


def test_the_batch_size_may_be_left_to_the_planner(tmp_path):
    config = parse_command_line(["--batch-size", "auto", "--max-batch-size", "100", "--group-size", "7"])
    assert config.batch_size == "auto"
    assert parse_command_line(["--config", yaml_file(tmp_path, "batch_size: auto")]).batch_size == "auto"
    with pytest.raises(ValueError, match="has not been found yet"):
        _ = config.num_rows
    found = dataclasses.replace(config, batch_size=98)
    assert (found.num_rows, found.num_prompts) == (98, 14)
    with pytest.raises(SettingsError, match="batch_size is 'many': give a value of type int or auto"):
        from_flat({"batch_size": "many"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("memory_limit", "much", "memory_limit is 'much', which is no size: write it like 24GB"),
        ("memory_limit", "0.5", "memory_limit is '0.5', which is no size: write it like 24GB"),
        ("device_memory", "0GB", "device_memory is '0GB', which is no size: write it like 24GB"),
        (
            "device_memory",
            "24GB",
            "device_memory is 24GB, which is for a card that is not there: add --dry-run",
        ),
    ],
)
def test_a_size_that_cannot_be_is_refused(capsys, name, value, message):
    assert message in refusal(capsys, f"--{name.replace('_', '-')}", value)


def test_memory_settings_are_sizes_as_people_write_them():
    config = parse_command_line(["--memory-limit", "24GB", "--dry-run", "--device-memory", "512 MB"])
    assert (config.memory_limit, config.device_memory, config.dry_run) == ("24GB", "512 MB", True)
    assert (Config().memory_limit, Config().memory_utilization, Config().max_batch_size) == (None, 0.85, 1024)


def test_a_reference_is_loaded_only_where_it_is_used():
    assert Config().uses_reference
    assert not from_flat({"kl_coef": 0.0}).uses_reference


def test_the_home_is_meant_by_its_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert from_flat({"runs_dir": "~/mine", "resume": "~/old"}).runs_dir == tmp_path / "mine"
    assert from_flat({"runs_dir": "~nobody-is-called-so/mine"}).runs_dir == Path("~nobody-is-called-so/mine")
