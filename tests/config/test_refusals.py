"""One table of all refusals: they name the setting and the value, and a word of the remedy."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch
from chess import STARTING_FEN as START
from commands import here
from padded_loss import grpo_loss
from report_folders import sweep_settings, write_run, write_sweep
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig

from grpo.commands.evaluate import EvaluateConfig
from grpo.commands.evaluate import main as evaluate_models
from grpo.config import Config, from_plain, parse_command_line
from grpo.config.groups import LoraSettings, LossSettings, OptimizerSettings, PromptSettings, SamplingSettings
from grpo.config.reading import read_yaml
from grpo.data import load_prompts
from grpo.data.reward_files import load_reward, load_rewards
from grpo.evaluate import Evaluation, evaluate, paired_difference
from grpo.learning.advantages import group_advantages
from grpo.learning.loss import StepCounts, adaptive_kl
from grpo.learning.optimizer import check_optimizer
from grpo.logs.tracking import METRICS_FILE, RunTracker
from grpo.memory import Device, Fit, PassSize
from grpo.model import attention
from grpo.model.adapters import add_adapters, save_adapters
from grpo.model.load import Policy, load_policy
from grpo.model.target import choose_device
from grpo.play.opponents import make_opponent
from grpo.play.record import Match
from grpo.play.self_play import read_mates, self_play
from grpo.rollout.sample import rollout
from grpo.run.dry_run import dry_run
from grpo.run.loading import check_quantized, check_shard, prompt_room
from grpo.run.setup import open_run
from grpo.scoring.head import chunked_lm_head
from grpo.scoring.model_checks import check_scorer
from grpo.trainer import Trainer
from grpo.types import Prompt
from grpo.workbench import sizes
from grpo.workbench.calculate import calculate
from grpo.workbench.cards import find_card
from grpo.workbench.corpus import open_corpus
from grpo.workbench.find_max import check as check_max
from grpo.workbench.findings import findings
from grpo.workbench.machine import probe_device
from grpo.workbench.report import write_report
from grpo.workbench.settings import Calculator, FindMax, Task
from grpo.workbench.sweep import open_sweep
from grpo.workbench.sweep_settings import Sweep
from rewards import REWARDS
from rewards.engine import EnginePool
from rewards.policy import PolicyReward, ReferenceMoves


@dataclass
class Given:
    """Things that a row may use to give something wrong."""

    config: Config
    folder: Path
    models: dict[str, Path]
    load: Callable[..., Policy]

    def file(self, name: str, content: str | bytes = "") -> Path:
        """A file in the test's own folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def typed(self, command: str, *words: object) -> None:
        """`grpo-lean COMMAND words`; ValueError with what it said on the screen where that was refused."""
        ended = here(command, *words)
        if ended.returncode:
            raise ValueError(re.sub(r"[│╭╮╰╯─\s]+", " ", ended.stdout + ended.stderr))


@pytest.fixture
def given(config, tmp_path, model_folders, load) -> Given:
    return Given(config, tmp_path, model_folders, load)


Row = tuple[Callable[[Given], Any], *tuple[str, ...]]
"""Something wrong, and what must be said of it."""


USER = {"role": "user", "content": "2 + 2?"}
MOVE_LINE = f"A: {START}+e2e4+e2e4+"
AGAINST = ["m", "--against", "random"]
PROFILES = "profiles: {single: {batch_size: 64}, quad: {batch_size: 256}}"
TINY = {"arch": "gpt2", "layers": 1, "width": 32, "heads": 2, "context": 32}
ON_CPU = {"device": "cpu"}
TEXT = {**TINY, **ON_CPU, "objective": "lm"}
SMALL_SWEEP = {"batch_sizes": (4, 16), "total_tokens": 1024, "data": "bundled", **TINY, **ON_CPU}


def each_at(make: Callable[[Given, Any], Any], *cases: tuple[Any, ...]) -> list[Row]:
    """A row for each case: what `make` is given beside `at`, and words that must be said."""
    return [(lambda at, given=given: make(at, given), *words) for given, *words in cases]


def each_of(make: Callable[..., Any], *cases: tuple[Any, ...]) -> list[Row]:
    """The same of settings by name, which need nothing of the test's own."""
    return each_at(lambda at, given: make(**given), *cases)


def each_value(make: Callable[..., Any], remedy: str, **settings: Any) -> list[Row]:
    """The same of single settings, of which it is said what each is; a tuple: of each value in it."""
    several = {name: given if isinstance(given, tuple) else (given,) for name, given in settings.items()}
    each = [(name, value) for name, values in several.items() for value in values]
    return each_of(make, *[({name: value}, f"{name} is {value!r}", remedy) for name, value in each])


def each_typed(command: str, *cases: tuple[Any, ...]) -> list[Row]:
    """The same of words that are typed behind a command."""
    return each_at(lambda at, words: at.typed(command, *words), *cases)


def written(**given: Any) -> Config:
    """As in a YAML file."""
    return from_plain(given)


def without_packages(check: Callable[[], object]) -> None:
    with mock.patch("importlib.util.find_spec", lambda name: None):
        check()


def load_without_hub(name: str) -> None:
    with mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
        load_policy(name, CPU)


def load_changed(at: Given, change: Callable[[Path], object]) -> None:
    """A model's folder of which something is not as it was."""
    folder = at.folder / "model"
    shutil.copytree(at.models["llama"], folder)
    change(folder)
    load_policy(str(folder), CPU)


def load_adapters(at: Given, change: Callable[[Path], object]) -> None:
    """The same of adapters."""
    model = at.load().model
    add_adapters(model, LoraSettings(lora_rank=2), base=str(at.models["gpt2"]))
    save_adapters(model, at.folder)
    change(at.folder)
    load_policy(str(at.folder), CPU)


def note(file: Path, **values: object) -> None:
    """Write them into a JSON file, beside what stands there."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def rename(file: Path, name: str, other: str | None) -> None:
    """A tensor; None: it is left out."""
    tensors = load_file(file)
    for each in [each for each in tensors if name in each]:
        moved = tensors.pop(each)
        tensors |= {each.replace(name, other): moved} if other else {}
    save_file(tensors, file, metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


WITHOUT_FILES = (
    ("model folder", "unk") if find_spec("sentencepiece") else ("needs a package", "SentencePiece")
)


def needs_a_package(folder: Path) -> None:
    """A tokenizer without files of its own."""
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").touch()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTSw3Tokenizer"}')


def check_shape(check: Callable[..., object], shape: Any, *given: Any) -> None:
    check(AutoModelForCausalLM.from_config(shape).eval(), *given)


def target_of(at: Given, name: str, *targets: str, kind: str | None = None) -> None:
    model = at.load(name).model
    model.config.model_type = kind or model.config.model_type
    add_adapters(model, LoraSettings(lora_rank=2, lora_targets=targets))


def rolled_out(at: Given, text: str) -> None:
    """12 tokens, in a context of 192."""
    policy, settings = at.load(), SamplingSettings(max_new_tokens=12)
    prompts = [Prompt("file:9", text, {})]
    rollout(policy.model, policy.tokenizer, prompts, torch.zeros(1, 12), settings, rows=1)


def scored(**given: Any) -> None:
    """Log-probs of 5 tokens, of a vocabulary of 11."""
    hidden, weight, targets = torch.zeros(5, 4), torch.zeros(11, 4), torch.zeros(5, dtype=torch.long)
    chunked_lm_head(hidden, **{"weight": weight, "targets": targets, **given})


CPU = torch.device("cpu")
ADAPTERS = "adapter_model.safetensors"
NO_MODEL = "does not hold a causal language model"
IN_4_BITS = {"lora_rank": 4, "load_in_4bit": True}


def loss_of_two_rows(kl_coef: float = 0.0, **given: torch.Tensor) -> None:
    """Makes prompts of three tokens each."""
    logs = dict.fromkeys(("logp", "old_logp"), torch.zeros(2, 3))
    inputs = {**logs, "ref_logp": None, "advantages": torch.ones(2), "mask": torch.ones(2, 3), **given}
    grpo_loss(**inputs, counts=StepCounts(2, 6, 3), settings=LossSettings(kl_coef=kl_coef))


def short(completions: list[str], **columns: object) -> list[float]:
    return [0.0 for _ in completions]


LETTERS = [{"prompt": f"P: {letter}"} for letter in "abcdefghijklmnop"]


def trl_trainer(at: Given, routed: bool = False, **given: Any) -> None:
    """TRL's settings and ours; the model is not there, unless it has a router, as TRL sees it."""
    import trl
    from accelerate.state import AcceleratorState
    from datasets import Dataset

    from grpo.trl import GRPOTrainer

    own = {name: given.pop(name) for name in ("memory_utilization", "memory_limit") if name in given}
    args = trl.GRPOConfig(output_dir=str(at.folder), use_cpu=True, bf16=False, report_to="none", **given)
    model: Any = "nowhere/nothing"
    if routed:
        model, tokenizer = at.load()[:2]
        model.config.output_router_logits = True
        own |= {"processing_class": tokenizer, "train_dataset": Dataset.from_list(LETTERS)}
    try:
        GRPOTrainer(model=model, reward_funcs=short, args=args, **own)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


REFUSED: dict[str, list[Row]] = {
    # one list for each room, in the order of the house; a row: (what is given, words that must be said)
    "config": [
        *each_value(
            written,
            "at least 1",
            steps=0,
            batch_size=0,
            num_iterations=0,
            num_engines=0,
            engine_depth=0,
            keep_checkpoints=0,
            max_new_tokens=-1,
            rollout_rows=0,
            score_rows=0,
            train_rows=-3,
        ),
        *each_value(
            written,
            "0 or more",
            eval_interval=-1,
            eval_prompts=-1,
            checkpoint_interval=-1,
            warmup_steps=-1,
            logged_completions=-1,
            show_completions=-1,
            refill_groups=-1,
            reference_sync=-1,
            lora_rank=-1,
            learning_rate=(-1e-5, math.nan, math.inf),
            weight_decay=-1.0,
            max_grad_norm=(-1.0, math.nan),
            kl_coef=(-0.1, math.inf),
        ),
        *each_value(
            written,
            "share between 0 and 1",
            policy_share=1.5,
            heldout_share=-0.1,
            max_bad_share=math.nan,
            min_lr_ratio=(2.0, math.nan),
        ),
        *each_value(written, "above 0 and up to 1", memory_utilization=(0.0, 1.1), top_p=(0.0, math.nan)),
        *each_value(
            written,
            "less than 1",
            clip_range=(0.0, math.nan),
            adam_beta1=1.0,
            adam_beta2=(1.0, -0.1, math.nan),
        ),
        *each_value(
            written,
            "more than 0",
            minutes=0.0,
            importance_cap=-1.0,
            kl_target=math.nan,
            lora_alpha=0.0,
            clip_range_high=-0.1,
        ),
        *each_value(written, "24GB", memory_limit=("much", "0.5"), device_memory="0GB"),
        # of another type in YAML, a word that is no choice
        *each_value(written, "type int", steps=("many", 1.5, True, None), train_rows="all"),
        *each_value(written, "type float", learning_rate=("fast", True)),
        *each_value(
            written,
            "give one of ",
            precision="fancy",
            engine="fancy",
            lr_schedule="fancy",
            trackers="fancy",
            advantage_scale="fancy",
            loss_type="fancy",
            kl_estimator="k1",
            importance_level="row",
        ),
        *each_value(
            written,
            "but lora_rank is 0: add --lora-rank 16",
            lora_merge=True,
            load_in_4bit=True,
            lora_alpha=8.0,
        ),
        *each_of(
            written,
            ({"batch_size": 60}, "batch_size is 60", "groups of 8", "give 56 or 64", "another group_size"),
            ({"batch_size": 4}, "batch_size is 4, and groups of 8 stay whole: give 8,"),
            ({"batch_size": "many"}, "batch_size is 'many'", "a value of type int or auto"),
            ({"group_size": 1}, "group_size is 1", "at least 2"),
            ({"rollout_rows": 12}, "rollout_rows is 12", "8 or 16"),
            ({"score_rows": 3}, "score_rows is 3", "2 or 4"),
            ({"train_rows": 7}, "is 7", "4 or 8"),
            ({"max_batch_size": 7}, "max_batch_size is 7", "at least one group, 8"),
            ({"temperature": 0.0}, "temperature is 0", "give more"),
            ({"top_k": -1}, "top_k is -1", "(all"),
            ({"loss_type": "cispo", "clip_range_high": 0.28}, "clip_range_high is 0.28", "ratio itself"),
            ({"loss_type": "cispo", "dual_clip": 3.0}, "dual_clip is 3.0, but cispo caps", "leave it out"),
            ({"dual_clip": 1.1}, "dual_clip is 1.1", "more than the upper clip, 1.2"),
            ({"device_memory": "24GB"}, "device_memory is 24GB", "not there: add --dry-run"),
            ({"reward": []}, "reward is []", "at least one"),
            ({"stop": ["x", ""]}, "['x', '']", "empty"),
            ({"reward": ["a.py:f", "b.py:f"]}, "reward is ['a.py:f', 'b.py:f']", "one name, rename"),
            ({"reward_weights": [1.0, math.nan]}, "reward_weights is [1.0, nan]", "finite"),
            ({"kl_target": 0.1, "kl_coef": 0.0}, "kl_target is 0.1, but kl_coef is 0", "more than 0"),
            ({"reference_sync": 3, "kl_coef": 0.0}, "reference_sync is 3, but kl_coef is 0"),
            ({"lora_rank": 4, "load_in_4bit": True, "precision": "fp64"}, "precision is fp64, but load"),
            ({"lora_rank": 4, "reference_device": "cpu"}, "reference_device is cpu, but ", "leave it out"),
            ({"lora_targets": ["c_attn"]}, "lora_targets", "but lora_rank is 0"),
            ({"credit": "field", "importance_level": "sequence"}, "credit is field, but", "give token"),
            ({"system_prompt": " "}, "system_prompt is ' '", "leave it out"),
            ({"system_prompt": "a", "chat": "off"}, "chat is off, but system_prompt", "leave one"),
            ({"name": ""}, "name is ''", "no name of one folder", "--runs-dir"),
            ({"name": "a/b"}, "name is 'a/b'", "no name of"),
            ({"name": ".."}, "name is '..'", "no name of"),
            ({"trailing_space": 1}, "trailing_space is 1", "type bool"),
            ({"model": [[3] * 99]}, "model is [[3, ", "...]]: give a value of type str"),
            ({"runs_dir": 3}, "runs_dir is 3", "type Path"),
            ({"reward": [True]}, "is True", "type str"),
            ({"reward_weights": [1.0, "two"]}, "reward_weights is 'two'", "type float"),
            ({"learning_rte": 1}, "no setting 'learning_rte'", "Did you mean 'learning_rate'?"),
            ({"kl-coef": 1}, "no setting 'kl-coef'", "Did you mean 'kl_coef'?"),
            ({"xyzzy": 1}, "no setting 'xyzzy'", "docs/settings.md and --help name them all"),
            ({"9" * 2000: 1}, "no setting '999", "...", "name them all"),
        ),
        # in Python: of a Config, and of a group alone
        (
            lambda at: Config(precision="fancy"),
            "precision is 'fancy'",
            "give one of auto, fp32, bf16, fp16, fp64",
        ),
        *each_value(SamplingSettings, "0 (greedy) or more", temperature=(-0.1, math.nan, math.inf)),
        (lambda at: LossSettings("dapo", dual_clip=1.0), "dual_clip is 1.0", "upper clip"),
        *each_at(
            lambda at, given: parse_command_line(["--config", str(at.file("my.yaml", given[0])), *given[1:]]),
            ([PROFILES, "--profile", "quat"], "profile is 'quat'", "my.yaml'", "'quad'? There are single"),
            ([PROFILES, "--profile", "x"], "profile is 'x'", "my.yaml': There are single, quad"),
            ([PROFILES], "holds profiles", "choose one with --profile, of single, quad"),
            (["steps: 7", "--profile", "quad"], "profile is 'quad'", "my.yaml' has none", "leave it out"),
            (["profiles:", "--profile", "x"], "are no named settings", "write a name below"),
            (["profiles: {steps: 1}"], "are no named settings", "write a name below"),
            (["profiles: {a: {bach_size: 64}}", "--profile", "a"], "'bach_size'", "'batch_size'"),
            (["profiles: {a: {batch_size: 60}}", "--profile", "a"], "batch_size is 60", "56 or 64"),
        ),
    ],
    "commands": [
        *each_typed(
            "train",
            (["--steps", 0], "steps is 0", "at least 1"),
            (["--steps", "many"], "--steps", "many"),
            (["--loss-type", "fancy"], "fancy", "'grpo'", "'dapo'", "'dr_grpo'", "'cispo'"),
            (["--bach-size", 64], "--bach-size", "--batch-size"),
            (["--profile", "quad"], "profile is 'quad'", "add --config FILE.yaml"),
            (["--resume", "9" * 5001], "resume is", "which is no run folder"),
            (["--resume", "[/x]"], "resume is '[/x]'", "which is no run folder", "give one that"),
            (["--prompts", "9" * 300], "prompts is '999", "up to 255 letters"),
            (["--lora-rank", 2**57], "lora_rank is 144115188075855872", "below 2^31"),
            (["--clip-range-high", 1e95], "clip_range_high is 1e+95", "below 1e30"),
            (["--config", "[/x].yaml"], "'[/x].yaml' does not exist"),
            (["--config", "."], "cannot be read"),
            (["--reward-weights", "nan", 1], "reward_weights is [nan, 1.0]"),
            (["--reward-weights", 0, 0], "reward_weights is [0.0, 0.0]"),
            (["--name", "\x1b[31m"], r"name is '\x1b[31m'", "cannot be printed"),
        ),
        (
            lambda at: at.typed("train", "--prompts", at.file("a.jsonl", b'{"prompt": "caf\xe9"}\n')),
            "a.jsonl",
            "no UTF-8: save the file in that encoding",
        ),
        (lambda at: at.typed("train", "--prompts", at.file("bad.pgn", "?\n")), "bad.pgn", "other --prompts"),
        *each_typed(
            "evaluate",
            ([], "no model is named", "give one or more"),
            (["a", "b", "--json", "s.json"], "--json is for one model, and 2", "name one"),
            (["a", "b", "--before", "s.json"], "--before is for one model, and 2", "name one"),
        ),
        *each_typed(
            "monitor",
            ([39, 64, "--model", "/no/such/model"], "no verdict: a trend needs 40 steps, and these are 39"),
            (["--attach", "/"], "holds no memory.jsonl"),
            (["--attach", "x", "--learning-rate", 1], "leave out --learning-rate 1"),
        ),
        *each_typed(
            "uci",
            (["--temperature", -1], "temperature is -1", "greedy"),
            (["--log", "."], "Is a directory"),
            (["--seed", -1], "seed is -1", "whole number from 0"),
        ),
        *each_typed(
            "match",
            (["rook-tiny"], "--against", "required"),
            ([*AGAINST, "--games", 0], "games is 0"),
            ([*AGAINST, "--nodes", 0], "nodes is 0"),
            ([*AGAINST, "--temperature", -1], "temperature is -1", "0 or more"),
            ([*AGAINST, "--movetime", 0], "movetime is 0", "at least 0.001"),
            ([*AGAINST, "--prompts", "bundled"], "add --from prompts"),
        ),
        *each_at(
            lambda at, two: at.typed("match", two[0], "--against", two[1], "--output", at.folder / "m"),
            (["no/such/model", "random"], "there is no such folder"),
            (["rook-tiny", "runs/none"], "'runs/none' is no local folder"),
        ),
        *each_at(
            lambda at, content: read_yaml(at.file("bad.yaml", content)),
            (b"", "bad.yaml' holds no settings"),
            (b"- 1", "bad.yaml' ", "steps: 100"),
            (b"\xff\xfe\x00", "bad.yaml' cannot be read"),
            (b"~: 1", "bad.yaml", "has None where a setting's name belongs"),
            (b"steps: 2026-13-45", "cannot be read: month must be in"),
            (b"[" * 3000 + b"]" * 3000, "nested too deep"),
            (b"'", "line 1: found unexpected end of stream"),
            (b"!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ),
    ],
    "data": [
        # rows of files: what is wrong with them comes with the row's place
        *[
            (
                lambda at, file=file, row=row: load_prompts(str(at.file(file, row)), seed=0),
                said,
                f"{file}:1: ",
                "repair them, or give other --prompts",
            )
            for file, row, said in (
                ("a.txt", "hello", "starts with 'P:' or 'A:'"),
                ("a.txt", "P: 8/8/8/8/8/8/8/8", "not a FEN"),
                (
                    "a.txt",
                    "P: 9/8/8/8/8/8/8/8 w - - 0 1 M: e2e4 E: 0.1 B: e2e4",
                    "invalid character in posit",
                ),
                ("a.txt", "P: 4k3/8/8/8/8/8/4Q3/4K3 w - - 0 1", "OPPOSITE_CHECK"),
                ("a.txt", "P: 7k/6Q1/6K1/8/8/8/8/8 b - - 0 1", "the game is over"),
                ("a.txt", f"P: {START} M: e2e4 E: nan B: e2e4", "missing or malformed"),
                ("a.txt", f"P: {START} M: e2e5 E: 0.1 B: e2e5", "the best label, e2e5, is illegal"),
                ("a.txt", f"A: {START}+e2e4+e2e4+{START}", "seven fields"),
                ("a.txt", f"A: {START}+0000+0000+", "not all UCI moves"),
                ("a.txt", f"{START}+e2e4+e2e4+", "starts with"),
                ("a.jsonl", "[1]", "not a JSON object"),
                ("a.txt", "A: startpos+e2e4+e2e4+", "not a FEN"),
                ("a.jsonl", '{"question": "?"}', "name one of question with --prompt-column"),
                ("a.jsonl", '{"prompt": {"role": "user"}}', "`prompt` is dict, and neither text nor a list"),
                ("a.jsonl", '{"prompt": " "}', "`prompt` is empty"),
                ("a.jsonl", '{"prompt": "a", "answer": -1e400}', "-1e400 is beyond the largest number"),
                ("a.csv", "prompt,answer\na,-1e400", "-1e400 is beyond the largest number"),
                ("a.jsonl", '{"prompt": "hi", "completions": "x"}', "rename column `completions`"),
                (
                    "a.jsonl",
                    '{"prompt": "hi", "task": "policy"}',
                    "rename column `task`: 'policy' in it means",
                ),
                ("a.jsonl", f'{{"fen": "{START}", "moves": ["e2e4"]}}', "1 moves and 0 evals"),
                ("a.jsonl", f'{{"fen": "{START}", "moves": ["e2e4"], "evals": [NaN]}}', "finite numbers"),
                (
                    "a.jsonl",
                    f'{{"fen": "{START}", "action": "e2e4", "history": ["d2d4"]}}',
                    "with the action",
                ),
                ("a.jsonl", '{"fen": "castle"}', "expected 8 rows"),
                ("a.pgn", '[Event "?"]\n\n1. e4 e5 2. Ke3 *', "illegal san: 'Ke3'"),
                ("a.pgn", '[Variant "Atomic"]\n\n1. e4 *', "not standard chess"),
                ("a.pgn", '[FEN "hello"]\n\n1. e4 *', "expected 8 rows"),
                ("a.pgn", '[Event "?"]\n\n1. e4 -- 2. d4 *', "null move"),
            )
        ],
        # files as a whole, and what is asked of them
        *[
            (
                lambda at, file=file, text=text, given=given: load_prompts(
                    str(at.file(file, text)) if file else str(at.folder), seed=0, **given
                ),
                *said,
            )
            for file, text, given, *said in (
                (
                    "a.jsonl",
                    '{"prompt": "a"\n{"prompt": "b"}',
                    {},
                    "(50.0%)",
                    "a.jsonl:1: ",
                    "-bad-share 0.5",
                ),
                ("a.parquet", "hello", {}, "a.parquet is not a parquet file"),
                ("a.csv", "prompt,answer\na,1,2\n", {}, "a.csv:1: 3 fields, and 2 names in the first line"),
                ("a.csv", "prompt,prompt\na,b\n", {}, "a.csv names a column twice in its first line"),
                ("a.csv", 'prompt\n"a\nb"\nc\n"d\ne\n', {}, "a.csv, in the row that begins in line 5"),
                ("a.jsonl", f'{{"prompt": "a"}}\n{{"fen": "{START}"}}', {"heldout_share": 0}, "mixes a `pro"),
                ("a.xls", "", {}, "a.xls", ".epd, .pgn, not from .xls files"),
                ("a.txt", "", {}, "no prompts"),
                ("", "", {}, "is a folder: name one file"),
                ("a.txt", MOVE_LINE, {"heldout_share": 1.0}, "all of them are held out", "--heldout-share"),
                (
                    "a.txt",
                    MOVE_LINE,
                    {"heldout_share": 0, "policy_share": 1.0},
                    "--policy-share 1",
                    "share 0",
                ),
                (
                    "a.txt",
                    f"P: {START}",
                    {"heldout_share": 0, "policy_share": 0.0},
                    "-policy-share 0",
                    "are 1",
                ),
            )
        ],
        (lambda at: load_prompts("nowhere/a.txt", seed=0), "no file nowhere/a.txt", "is no folder nowhere"),
        (lambda at: load_prompts("bundle", seed=0), "no file bundle", "OWNER/NAME on the hub"),
        *each_at(
            lambda at, typed: at.file("train.txt") and load_prompts(f"{at.folder}/{typed}", seed=0),
            ("tran.txt", "/tran.txt", "did you mean", "/train.txt?"),
            ("train.jsonl", "/train.jsonl", "did you mean", "/train.txt?"),
        ),
        # what is asked, and how
        *[
            (
                lambda at, asked=asked, given=given: load_prompts(
                    [{"prompt": asked}],
                    seed=0,
                    room=prompt_room(str(at.models["gpt2"]), 16),
                    settings=PromptSettings(
                        **{
                            name: at.file(name, text) if name.endswith("template") else text
                            for name, text in given.items()
                        }
                    ),
                ),
                *said,
            )
            for asked, given, *said in (
                ([USER, {"content": "?"}], {}, "message 2 of `prompt` has no role", "user or assistant"),
                ([{"role": "user", "content": []}], {}, "message 1 of `prompt` has empty as its content"),
                (["hello"], {}, "message 1 of `prompt` is str", "role and content"),
                ([], {}, "`prompt` is empty, and neither text nor a list"),
                ([USER], {}, "has no chat template", "give --chat-template FILE"),
                ("a", {"system_prompt": "b"}, "has no chat template", "give --chat-template FILE"),
                ([USER], {"chat_template": "{{ raise_exception('no') }}"}, "template does not take it: no"),
                (
                    [USER],
                    {"chat_template": "{{ question"},
                    "the chat template is no Jinja",
                    "--chat-template",
                ),
                (
                    "a",
                    {"prompt_template": "{{ question"},
                    "prompt_template is '",
                    "no Jinja template: line 1",
                ),
                ("a", {"prompt_template": " \n"}, "prompt_template is '", "is empty: write"),
                ("a", {"prompt_template": "{{ question }}"}, "'question' is undefined; there are prompt"),
                ("a", {"prompt_template": "{{ 1 / 0 }}"}, "1 of 1 rows", "division by zero"),
                ("a", {"prompt_template": "{{ prompt + 1 }}"}, "1 of 1 rows", "can only concatenate str"),
                ("a", {"prompt_column": "question"}, "no `question`; there are prompt"),
            )
        ],
        (
            lambda at: load_prompts([], seed=0, settings=PromptSettings(prompt_template=Path("no"))),
            "prompt_template is 'no'",
            "No such file",
        ),
        (
            lambda at: load_prompts(
                [{"fen": START}], seed=0, heldout_share=0, settings=PromptSettings(chat="on")
            ),
            "holds chess positions",
            "leave the settings of chats",
        ),
        # rewards in files
        (lambda at: load_reward("polcy"), "reward 'polcy' is not known", "policy, ", "file.py:name"),
        (lambda at: load_reward("/no/such.py:f"), "there is no file '/no/such.py'"),
        (lambda at: load_reward(f"{at.file('a.txt')}:f"), "a.txt' is not a Python file"),
        (lambda at: load_rewards(["policy"], (1.0, 2.0)), "reward_weights has 2 numbers for 1", "one each"),
        *each_at(
            lambda at, text: load_reward(f"{at.file('mine.py', text)}:f"),
            ("def g(): 0\ndef h(): 0", "no function 'f'", "has g, h"),
            ("f = 3\ndef g(): 0", "it has g"),
        ),
    ],
    "distributed": [
        (lambda at: open_run(replace(at.config, shard=True)).__enter__(), "there is one process", "torchrun"),
        (
            lambda at: dry_run(replace(at.config, shard=True, dry_run=True), Console()),
            "dry_run and shard are on",
            "leave out --dry-run",
        ),
        *each_at(
            lambda at, more: check_shard(replace(at.config, shard=True, **more), mock.Mock(size=2)),
            ({"lora_rank": 4}, "shard is on, and", "lora_rank is"),
            ({"optimizer_kind": "adamw8bit"}, "optimizer_kind is"),
            ({"reference_device": "cpu"}, "shard is on, and", "reference_device is"),
        ),
    ],
    "evaluate": [
        *each_of(
            lambda **given: evaluate_models(EvaluateConfig(("rook-tiny",), **given), Console()),
            ({"samples": 0}, "samples is 0", "at least 1"),
            ({"heldout_share": 1.1}, "heldout_share is 1.1", "between 0 and 1"),
            ({"max_bad_share": math.nan}, "max_bad_share is nan", "between 0 and 1"),
            ({"json": Path("no/scores.json")}, "no/scores.json", "there is no folder no", "make it"),
            ({"mate_in_one": Path("none.json")}, "none.json is no", "FileNotFoundError", "https://"),
            ({"before": Path("none.json")}, "none.json is no saved evaluation", "--json"),
            ({"max_new_tokens": 500}, "leaves 12 beside --max-new-tokens 500", "lower"),
        ),
        (lambda at: evaluate_models(EvaluateConfig(("x",), prompts="no.txt"), Console()), "no file no.txt"),
        *[
            (lambda at, text=text: Evaluation.load(at.file("a.json", text)), "a.json is no saved", "--json")
            for text in ("", "[1]", '{"a": {"scores": ["x"], "prompts": ""}}')
        ],
        *each_at(
            lambda at, text: read_mates(at.file("task.json", text)),
            ("{", "is not BIG-bench's checkmate_in_one", "task.json", "https://"),
            ('{"examples": []}', "no examples"),
            ('{"examples": [{"a": 1}]}', "KeyError"),
            ('{"examples": [{"input": 3}]}', "example 1", "task.json", "https://"),
            ('{"examples": [{"input": "1. e4 e4"}]}', "example 1", "illegal san"),
            ('{"examples": [{"input": "1. e4 e5"}]}', "example 1", "no move mates"),
        ),
        *each_of(
            lambda **given: evaluate(None, None, settings=SamplingSettings(8), rows=1, seed=0, **given),
            ({"prompts": []}, "no prompts to evaluate", "hold some out"),
            ({"prompts": [Prompt("a", "x", {})], "samples": 0}, "samples is 0", "at least 1"),
        ),
        *each_of(
            lambda **given: self_play(None, seed=0, **given),
            ({"num_games": 0}, "number of games is 0", "at least 1"),
            ({"num_games": 4, "fens": ["x"] * 3}, "4 games", "at most 3 games"),
        ),
        *each_of(
            lambda column, other: paired_difference(Evaluation({"a": 0}, {"a": ""}), other, column),
            ({"column": "b", "other": Evaluation({}, {})}, "no column 'b'"),
            ({"column": "a", "other": Evaluation({"a": 0}, {"a": "x"})}, "'a' is of other prompts", "same"),
        ),
    ],
    "learning": [
        *each_of(
            lambda **given: check_optimizer(OptimizerSettings(optimizer_kind="adamw8bit"), **given),
            ({"device": torch.device("mps"), "dtype": torch.float32}, "adamw8bit", "not on mps: give adamw"),
            ({"device": torch.device("cpu"), "dtype": torch.float64}, "precision is fp64", "give adamw"),
        ),
        (
            lambda at: without_packages(
                lambda: check_optimizer(OptimizerSettings(optimizer_kind="adamw8bit"), CPU, torch.float32)
            ),
            "optimizer_kind is adamw8bit",
            "pip install bitsandbytes, or give adamw",
        ),
        *each_of(
            loss_of_two_rows,
            ({"kl_coef": 0.1}, "kl_coef is 0.1", "ref_logp is None"),
            ({"advantages": torch.ones(2, 1)}, "(2, 1)"),
            ({"old_logp": torch.ones(2, 1)}, "(2, 1)"),
        ),
        (lambda at: adaptive_kl(0.02, 0.1, 0.0), "0.0", "above 0"),
        (lambda at: adaptive_kl(0.02, math.nan, 0.1), "nan", "skipped"),
        *each_of(
            lambda rewards, **more: group_advantages(torch.tensor(rewards), **{"group_size": 2, **more}),
            ({"rewards": [1.0] * 6, "group_size": 4}, "(6,)", "whole groups of 4"),
            ({"rewards": [1.0] * 6, "group_size": 1}, "group_size is 1", "siblings"),
            ({"rewards": [1.0] * 6, "scale": "std"}, "'std'", "'batch'"),
            ({"rewards": [0.0, 1.0, math.nan, 1.0]}, "row 2 is nan", "finite"),
        ),
        *each_at(  # the trainer as a library
            lambda at, given: Trainer(at.config, **{"prompts": LETTERS, "rewards": [short], **given}),
            ({"model": 3}, "model is a int", "give a name"),
            ({"prompts": []}, "no prompts to train on", "the prompts given"),
            ({"prompts": [{"question": "?"}]}, "none of the columns `prompt`"),
            ({"rewards": [short, short]}, "two rewards are called 'short'", "rename one"),
            ({"rewards": [lambda completions, limit, **columns: []]}, "missing a required argument: 'limit'"),
        ),
    ],
    "memory": [
        (lambda at: Fit(Device()).predict("learn", PassSize(4)), "nothing was measured yet"),
    ],
    "model": [
        *each_of(
            load_without_hub,
            (
                {"name": "nobody/no-such-model"},
                "nobody/no-such-model",
                "could not be fetched",
                "rook-tiny",
                "hf download nobody/no-such-model --local-dir FOLDER",
                "give the folder as the model",
            ),
            ({"name": "not a model"}, "not a model", "Two ways out"),
            *(
                ({"name": name}, f"model is {name!r}: there is no such folder")
                for name in ("/tmp/no-model-here", "./no-model-here", "~/no-model", "runs/a/no-model")
            ),
        ),
        (lambda at: choose_device("cuda:99"), "device is 'cuda:99', which cannot", "give cpu"),
        (lambda at: choose_device("warp-drive"), "device is 'warp-drive', which cannot", "give cpu"),
        (lambda at: load_policy(str(at.folder), CPU), "model folder", NO_MODEL),
        *each_at(
            load_changed,
            (pickled, "model folder", "does not hold", "in safetensors"),
            (needs_a_package, *WITHOUT_FILES),
            (lambda folder: (folder / "config.json").unlink(), "model folder", NO_MODEL),
            (lambda folder: (folder / "tokenizer.json").unlink(), "model folder", NO_MODEL),
            (lambda folder: (folder / "config.json").write_text("{"), "model folder", NO_MODEL),
            (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{"), NO_MODEL),
            (
                lambda folder: rename(folder / "model.safetensors", ".layers.1.", None),
                "lacks model.layers.1.",
                "and 6 more",
            ),
            (
                lambda folder: note(folder / "config.json", vocab_size=1000),
                "has in another shape lm_head.weight, model.embed_tokens.weight.",
            ),
            (lambda folder: note(folder / "tokenizer_config.json", eos_token=None), "without an end-of-text"),
        ),
        *[
            (
                lambda at, kind=kind: load_changed(
                    at,
                    lambda folder: note(
                        folder / "config.json", quantization_config={"quant_method": kind, "bits": 4}
                    ),
                ),
                f"({kind})",
                package,
                "--lora-rank 16",
            )
            for kind, package in (("gptq", "optimum"), ("awq", "gptqmodel"))
        ],
        (
            lambda at: check_shape(
                check_scorer,
                LlamaConfig(
                    vocab_size=50,
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    initializer_range=0.3,
                    logits_scaling=4.0,
                ),
                64,
            ),
            "LlamaForCausalLM cannot be trained here",
            "nats wrong",
            "--model",
        ),  # its logits are not divided
        (
            lambda at: check_shape(
                check_scorer,
                BertConfig(
                    vocab_size=50,
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=1,
                    num_attention_heads=4,
                ),
                64,
            ),
            "BertLMHeadModel cannot be trained here",
            "nats wrong",
            "--model",
        ),  # it sees what follows
        (
            lambda at: attention.attend_in_fp32(
                None, *[torch.zeros(1, 1, 1, 8)] * 4, softcap=50.0, s_aux=None
            ),
            "its scores are capped, or have sinks",
        ),
        *[
            (
                lambda at, name=name: target_of(at, "gpt2", "c_attn", name),
                f"'{name}', which is none",
                "give some of c_attn, c_fc, c_proj, or",
            )
            for name in ("q_proj", "lm_head", "wte", "attn")
        ],
        (lambda at: target_of(at, "llama", kind="new"), "peft knows none", "give some of down_proj, "),
        (lambda at: load_adapters(at, at.load().model.save_pretrained), "adapters", "and a whole model"),
        *each_at(
            load_adapters,
            (
                lambda folder: note(folder / "adapter_config.json", base_model_name_or_path=None),
                "does not say of which model",
            ),
            (
                lambda folder: rename(folder / ADAPTERS, ".h.0.attn.c_attn.lora_A", None),
                "lacks 1 of their weights and has 0 besides",
            ),
            (
                lambda folder: rename(
                    folder / ADAPTERS, ".h.0.attn.c_attn.lora_A", ".h.7.attn.c_attn.lora_A"
                ),
                "lacks 1 of their weights and has 1 besides",
            ),
        ),
        *each_at(
            lambda at, more: without_packages(
                lambda: open_run(replace(at.config, model="/no/such/model", **more)).__enter__()
            ),
            ({"lora_rank": 4}, "lora_rank is 4", "pip install peft"),
            (IN_4_BITS, "load_in_4bit is True", "pip install bitsandbytes"),
        ),
        (
            lambda at: Trainer(replace(at.config, **IN_4_BITS), model=at.load().model),
            "load_in_4bit is True, but the model is loaded already",
        ),
        (
            lambda at: check_quantized(
                at.config,
                LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
            ),
            "(bitsandbytes in 4 bits)",
            "--lora",
        ),
        (
            lambda at: check_quantized(
                replace(at.config, lora_rank=4, lora_merge=True),
                LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
            ),
            "lora_merge is True",
            "quantized (bitsandbytes)",
        ),
    ],
    "plan": [],
    "play": [
        *[
            (lambda at, text=text: Match.load(at.file("games.pgn", text).parent), "is no match", "another")
            for text in (
                "",
                "[]",
                '[White "a"]\n\n1. e4 *',
                '[Site "grpo-lean"]\n\n1. e5 *',
                '[Site "grpo-lean"]\n[FEN "x"]\n\n*',
            )
        ],
        *each_of(
            lambda name: make_opponent(name, None, 1, None).__enter__(),
            ({"name": "uci:"}, "no program", "path"),
            ({"name": "uci:/no/such/engine"}, "'/no/such/engine', which is no program", "path"),
            ({"name": "stockfish:strong"}, "'stockfish:strong'", "give stockfish, or its Elo"),
        ),
    ],
    "rewards": [
        *each_of(
            EnginePool,
            ({"depth": 0}, "depth=0", "at least 1"),
            ({"num_engines": 0}, "num_engines=0", "at least 1"),
        ),
        *each_of(
            lambda **given: ReferenceMoves.from_labels(None, **given),
            ({"moves": ["a4a5"], "numbers": []}, "1 moves and 0 evals", "one eval a move"),
            ({"moves": ["a4a5"], "numbers": [math.nan]}, "finite", "[nan]"),
        ),
        *each_of(
            lambda **given: REWARDS["policy"].with_weights(given),
            ({"speling": 1.0}, "['speling']", "best_move", "format"),
            ({"format": -1.0}, "'format': -1.0"),
            ({"format": math.nan}, "'format': nan", "finite"),
            ({"format": math.inf}, "'format': inf"),
        ),
        (lambda at: REWARDS["environment"].with_weights({"best_move": 1.0}), "['best_move']", "fen_match"),
        (lambda at: PolicyReward(weights={"format": 0.0}), "at least one weight above 0"),
        *each_of(
            REWARDS["policy"],
            ({"prompts": ["P: "] * 2, "completions": ["a"]}, "2 prompts and 1 completions", "as many"),
            ({"prompts": ["P: "] * 2, "completions": ["a"] * 2, "fen": [START]}, "'fen' has 1 rows for 2"),
            (
                {
                    "prompts": [f"P: {START}"],
                    "completions": ["a"],
                    "fen": [START],
                    "moves": [["e2e4"]],
                    "evals": [[]],
                },
                "1 moves and 0 evals",
            ),
        ),
    ],
    "rollout": [
        (lambda at: rolled_out(at, ""), "prompt file:9 is empty"),
        (lambda at: rolled_out(at, "P: " + "8/" * 100), "prompt file:9 has ", "leaves 180 "),
    ],
    "run": [
        (
            lambda at: Trainer(replace(at.config, max_new_tokens=192)),
            "max_new_tokens is 192",
            "192 tokens: give less",
        ),
        *each_at(
            lambda at, rows: Trainer(at.config, prompts=rows),
            (7, "prompts is a int: give rows"),
            ({"prompt": ["a"]}, "prompts is a dict: give rows"),
            (["a"], "prompts is a list of str: give rows"),
        ),
        (
            lambda at: at.file(f"{METRICS_FILE}/x") and RunTracker(at.folder, trackers=(), settings={}),
            "metrics.jsonl cannot be written (Is a directory)",
            "make room",
        ),
    ],
    "scoring": each_of(
        scored,
        ({"targets": torch.zeros(4, dtype=torch.long)}, "(5, 4), (4,)", "do not go together"),
        ({"targets": torch.zeros(5, 1, dtype=torch.long)}, "(5, 4), (5, 1)", "do not go together"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ),
    "trl": [
        *each_at(
            lambda at, given: trl_trainer(at, **given),
            ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2", "set it to 1.0"),
            ({"loss_type": "new_loss"}, "'new_loss'", "set loss_type to one of grpo"),
            ({"memory_utilization": 1.5}, "memory_utilization=1.5", "a share"),
            ({"memory_limit": "lots"}, "lots", "write it like 24GB"),
            ({"routed": True, "router_aux_loss_coef": 0.1}, "auxiliary loss", "router_aux_loss_coef=0.0"),
        ),
    ],
    "workbench": [
        *each_of(
            Task,
            ({"layers": 0}, "layers is 0", "at least 1"),
            ({"d_ff": 0}, "d_ff is 0", "at least 1"),
            ({"width": 100, "heads": 3}, "width is 100", "not a multiple of 3 heads", "change one"),
            ({"heads": 4, "kv_heads": 3}, "kv_heads is 3", "no divisor of 4 heads", "leave it out"),
            ({"arch": "llama", "width": 12, "heads": 4}, "width 3", "rotated in pairs", "multiple of two"),
        ),
        *each_at(
            lambda at, data: open_corpus(Task(data=data and str(at.folder / data), **TEXT)),
            (None, "data is not given", "--data FILE"),
            ("nowhere", "which is no file", "a text"),
        ),
        (lambda at: open_corpus(Task(data=str(at.file("empty")), **TEXT)), "which is empty", "a text file"),
        (
            lambda at: open_corpus(Task(data=str(at.file("short", "short")), **TEXT)),
            "5 tokens",
            "331",
            "a longer file",
        ),
        (lambda at: probe_device("cuda:77", "auto"), "device is 'cuda:77'"),
        *each_value(Calculator, "a share ", overhead_share=1.0),
        *each_of(
            Calculator,
            ({"gpus": 0}, "gpus is 0", "at least 1"),
            ({"frozen": (0.0,)}, "frozen is [0.0]", "a number of"),
            ({"trainable": -1.0}, "trainable is -1"),
            ({"gpu": "h100", "gpu_memory": "8GB"}, "gpu is 'h100' and gpu_memory '8GB'", "give one"),
            ({"trainable": 1e8, "model": "m"}, "trainable is 1e+08", "model, m", "give one"),
            ({"optimizer": "sgd"}, "optimizer is sgd", "planned", "leave it out, or"),
            ({"trainable": 1e8, "prompt_tokens": 8}, "prompt_tokens is 8", "leave it out"),
            ({"json": Path("nowhere/p.json")}, "json is nowhere/p.json", "no folder nowhere", "make it"),
        ),
        (lambda at: Calculator.parse(["--gpu", "h100", "--dry-run"]), "--dry-run is given", "leave it out"),
        *each_of(
            lambda gpu=None, **given: calculate(
                Calculator(gpu=gpu, **given), find_card(gpu, given.get("gpu_memory"))
            ),
            ({"gpu": "h10"}, "gpu is 'h10'", "Did you mean h100?", "--gpu-memory"),
            ({"gpu": "a100"}, "gpu is 'a100'", "a100-40gb or a100-80gb?"),
            ({"gpu_memory": "big"}, "gpu_memory is 'big'", "no size", "24GB"),
            (
                {"gpu": "h100", "frozen": (8e9, 7e10), "trainable": 1e8},
                "frozen, 8 + 70 B: 145.29 GB",
                "h100 offers 78.40",
                "fewer or smaller models",
            ),
            ({"gpu": "h100", "trainable": 1e10}, "trainable, 10 B", "optimizer: 111.76 GB", "a smaller"),
            ({"gpu_memory": "100MB"}, "overhead: 0.50 GB", "98 MB", "a smaller model"),
            (
                {"gpu": "h100", "model": "rook-tiny", "max_new_tokens": 900},
                "max_new_tokens is 900, but the model's context is 512",
            ),
            ({"gpu": "h100", "trainable": 1e8, "sample_memory": "much"}, "sample_memory is 'much'", "size"),
        ),
        *each_of(
            FindMax,
            ({"start": 0}, "start is 0", "at least 1"),
            (TINY, "arch is 'gpt2'", "give --model"),
        ),
        *each_at(
            lambda at, words: FindMax.parse(words),
            (["--batch-size", "8"], "--batch-size is given", "leave it out"),
            (["--steps=8"], "--steps is given, which is chosen by itself here"),
            (["--config", "nowhere.yaml"], "config file 'nowhere.yaml' does not exist"),
        ),
        *each_of(
            lambda trials=(), **given: findings(check_max(FindMax(**TEXT, **given)), trials),
            ({}, "data is not given", "--data FILE"),
            ({"data": "nowhere.txt"}, "'nowhere.txt', which is no file"),
            (
                {"data": "bundled", "trials": [sizes.SizeResult(4, "failed", "nowhere.txt")]},
                "batch 4 failed, and not for want of memory",
                "nowhere.txt",
            ),
            (
                {"data": "bundled", "trials": [sizes.SizeResult(4, "out of memory", "learn took more")]},
                "not even a batch of 4 fits",
                "learn took more",
                "--gradient-checkpointing full",
            ),
        ),
        (lambda at: check_max(FindMax(prompt_tokens=500, **ON_CPU)), "500 and 144", "512 tokens", "less"),
        *each_of(
            lambda **given: open_sweep(Sweep(**{**SMALL_SWEEP, **given})),
            ({"batch_sizes": (0, 8)}, "holds 0", "at least 1"),
            ({"batch_sizes": (64,)}, "total_tokens is 1024, less than one batch of 64", "2048"),
            ({"evaluations": 0}, "evaluations is 0", "at least"),
            ({"warmup_share": 1.5}, "_share is 1.5"),
            ({"data": "no-such-file.txt"}, "data is 'no-such-file.txt', which is no file"),
            ({"vocab": 100}, "vocabulary has 100", "give --vocab 256 or more"),
            ({"arch": None, "context": 600, "total_tokens": 10_000}, "context is 600", "reaches 512"),
            ({"data": None}, "data is not given", "--data"),
            ({"device": "cuda:77"}, "device is 'cuda:77'"),
            ({"objective": "grpo"}, "arch is 'gpt2'", "--model"),
        ),
        (
            lambda at: mock.patch.dict(os.environ, CXX="/no/compiler")(open_sweep)(
                Sweep(**SMALL_SWEEP, compile=True)
            ),
            "compile is on, but there is no C++ compiler",
            "leave it out",
        ),
        *each_of(
            lambda **given: open_sweep(
                Sweep(objective="grpo", **{"batch_sizes": (8,), "device": "cpu", **given})
            ),
            ({"compile": True}, "compile is on", "leave it out"),
            ({"batch_sizes": (8, 12)}, "batch_size is 12", "8 or 16"),
            ({"batch_sizes": (16,), "total_samples": 8}, "total_samples is 8, less than one batch of 16"),
            ({"max_new_tokens": 512}, "512, but the model's context is 512"),
            ({"prompts": "nothing.jsonl"}, "nothing.jsonl"),
            ({"reward": ("no_such_reward",)}, "no_such_reward"),
        ),
        *each_at(
            lambda at, words: Sweep.parse(words),
            (["--eval-interval", "5"], "--eval-interval is given", "leave it out"),
        ),
        (lambda at: write_report([]), "no folder is given", "give that of a run"),
        (lambda at: write_report([at.folder]), "neither a run nor a sweep", "Give the folder that"),
        (
            lambda at: write_report([at.file("sweep.json", json.dumps(sweep_settings())).parent]),
            "no size has been tried",
            "run the sweep",
        ),
        (lambda at: write_report([at.file("metrics.jsonl").parent]), "logged no step yet", "wait"),
        (lambda at: write_report([write_run(at.folder / "a"), write_sweep(at.folder / "b")]), "of one kind"),
        (lambda at: write_report([at.folder, at.folder / "a" / ".."]), "given twice", "give each once"),
        (
            lambda at: write_report(
                [at.file("a/metrics.jsonl", '{"step": 1, "kl": 0}').parent], at.file("out")
            ),
            "cannot be written to",
            "/out",
            "--output",
        ),
        *each_typed("report", (["nowhere"], "no folder", "that of a run"), (["[/x]"], "[/x] is no folder")),
    ],
}
ROWS = [(room, row) for room, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(
    ("give", "words"), [(row[0], row[1:]) for _, row in ROWS], ids=[f"{room}: {row[1]}" for room, row in ROWS]
)
def test_what_is_wrong_is_named_with_its_value_and_a_remedy(given, give, words):
    """In few lines and without a traceback, wherever it was written."""
    with pytest.raises((ValueError, OSError)) as refused:
        give(given)
    said = str(refused.value)
    assert not [word for word in words if word not in said], said
    assert "Traceback" not in said and len(said) < 1500
