"""What settings mean, for people: the help of the command line, and docs/settings.md.

A setting's text is the string below its field; sections are here, as a dataclass knows none.
"""

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from grpo.config.groups import LoraSettings, LossSettings, OptimizerSettings, PromptSettings, SamplingSettings
from grpo.config.reading import to_flat
from grpo.config.settings import Config

FIRST = (
    "model", "prompts", "reward", "steps", "batch_size", "group_size", "learning_rate", "kl_coef",
    "max_new_tokens", "stop", "memory_limit", "minutes", "name", "resume", "dry_run",
)  # fmt: skip
"""What people need first."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "The run": ("max_batch_size", "seed", "wait_minutes"),
    "The model": ("device", "reference_device", "reference_sync", "precision", "shard"),
    "Adapters (LoRA)": tuple(each.name for each in fields(LoraSettings)),
    "The data": (
        *(each.name for each in fields(PromptSettings)), "policy_share", "heldout_share", "max_bad_share",
    ),
    "The rewards": ("reward_weights", "engine", "stockfish_path", "engine_depth", "num_engines"),
    "Sampling": tuple(each.name for each in fields(SamplingSettings)),
    "The algorithm": (
        "advantage_scale", "credit", "num_iterations", "mask_truncated", "refill_groups", "importance_cap",
        "kl_in_reward", "kl_target",
    ),
    "The loss": tuple(each.name for each in fields(LossSettings)),
    "The optimizer": tuple(each.name for each in fields(OptimizerSettings)),
    "Memory: rows at once and speed, not the result": (
        "memory_utilization", "device_memory", "rollout_rows", "score_rows", "train_rows",
        "gradient_checkpointing",
    ),
    "Evaluation": ("eval_interval", "eval_prompts"),
    "The run folder": (
        "runs_dir", "checkpoint_interval", "keep_checkpoints", "trackers", "logged_completions",
        "show_completions", "log_level",
    ),
}  # fmt: skip
"""All others, and those of FIRST where they belong to a group."""


class Setting(NamedTuple):
    """As people write it."""

    name: str
    default: str
    choices: tuple[str, ...]
    text: str

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def settings() -> dict[str, Setting]:
    """All settings by name."""
    texts, choices = _texts(Config), _choices(Config)
    defaults = to_flat(Config())
    return {
        name: Setting(name, _shown(value), choices[name], texts[name]) for name, value in defaults.items()
    }


def sections() -> dict[str, list[Setting]]:
    """Settings by section, each in one: what people need first, then the others."""
    known = settings()
    found = {"First": [known[name] for name in FIRST]}
    for section, names in SECTIONS.items():
        found[section] = [known[name] for name in names if name not in FIRST]
    return found


def _texts(kind: type) -> dict[str, str]:
    """By field, the string below it; those of a field that is a group of settings are its fields'."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for item, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            words = following.value if isinstance(following, ast.Expr) else None
            if isinstance(words, ast.Constant):
                texts[item.target.id] = " ".join(str(words.value).split())
    for each in fields(kind):
        if is_dataclass(each.default_factory):
            texts |= _texts(each.default_factory)  # type: ignore[arg-type]
    return texts


def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    """By field, the words that it is one of; none where it is not."""
    found: dict[str, tuple[str, ...]] = {}
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            found |= _choices(hint)  # type: ignore[arg-type]
        else:
            found[name] = get_args(hint) if get_origin(hint) is Literal else ()
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def help_text(program: str, width: int = 100) -> str:
    """What `--help` prints."""
    lines = [
        f"usage: {program} [--config FILE.yaml [--profile NAME]] [FLAGS]", "",
        "Train a language model with GRPO: groups of completions, compared with their siblings.", "",
        *textwrap.wrap(
            "--config FILE.yaml sets defaults that flags override; --profile NAME takes one of its profiles. "
            "A flag that is on or off is given as --flag or --no-flag. Defaults are in brackets.", width
        ),
    ]  # fmt: skip
    for section, members in sections().items():
        lines += ["", "What people need first" if section == "First" else section]
        for each in members:
            among = f"; of {', '.join(each.choices)}" if each.choices else ""
            first, *rest = textwrap.wrap(f"{each.text} [{each.default}{among}]", width - 28)
            lines.append(f"  {each.flag:<25} {first}")
            lines += [" " * 28 + line for line in rest]
    return "\n".join(lines)


def settings_page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings", "",
        "Flags of `grpo-lean train` (`python train_lean.py`), and names in `--config FILE.yaml`,",
        "where a dash is an underscore. This page is made by `python scripts/settings_page.py`.",
    ]  # fmt: skip
    for section, members in sections().items():
        title = "What people need first" if section == "First" else section
        lines += ["", f"## {title}", "", "| flag | default | |", "|---|---|---|"]
        for each in members:
            among = f" One of {', '.join(each.choices)}." if each.choices else ""
            lines.append(f"| `{each.flag}` | {each.default} | {_escaped(each.text + among)} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
