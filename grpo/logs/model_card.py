"""The card of a trained model, beside its weights, and its way to the hub.

Everything in a card stands in the files of its run: settings, and held-out quality before and after.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCardData, constants
from loguru import logger

from grpo.config import Config
from grpo.config.reading import CONFIG_FILE, read_yaml, to_plain
from grpo.files import shown
from grpo.logs.tracking import METRICS_FILE, read_lines

_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_OF_THE_FOLDER = "name", "runs_dir", "resume", "push_to_hub", "trackers", "log_level"
"""Settings that say nothing of the model."""


def write_card(run: Path, file: Path) -> None:
    """The card of the model that a run has trained so far; none of a folder that is no run's."""
    if (run / CONFIG_FILE).is_file():
        file.write_text(model_card(run), encoding="utf-8")


def model_card(run: Path) -> str:
    """In Markdown, with the header that the hub reads."""
    settings = read_yaml(run / CONFIG_FILE)
    lines = read_lines(run / METRICS_FILE)
    lines = [line for line in lines if isinstance(line.get("step"), int)]  # others are nobody's of ours
    steps = max((line["step"] for line in lines), default=0)
    settings = {name: _without_folders(value) for name, value in settings.items()}
    base, prompts = str(settings["model"]), str(settings["prompts"])
    has_adapters = bool(settings.get("lora_rank"))
    header = ModelCardData(
        base_model=base if _ON_HUB.fullmatch(base) else None,
        datasets=prompts.split(":")[0] if _ON_HUB.match(prompts) and not Path(prompts).exists() else None,
        library_name="peft" if has_adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "grpo-lean"],
    )
    defaults = to_plain(Config())
    changed = {
        name: value
        for name, value in settings.items()
        if name not in _OF_THE_FOLDER and defaults.get(name) != value
    }
    rewards = ", ".join(f"`{name}`" for name in settings["reward"])
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {run.name}",
        f"`{base}`, trained with GRPO by grpo-lean: {steps:,} steps of {settings['batch_size']} completions "
        f"in groups of {settings['group_size']}, on the prompts `{prompts}` and the rewards {rewards}.",
        *_quality(lines),
        "## Use",
        f"```python\n{usage(has_adapters)}\n```",
        "## Settings",
        "What differs from grpo-lean's defaults:",
        f"```yaml\n{yaml.safe_dump(changed, sort_keys=False).strip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _without_folders(value: Any) -> Any:
    """A path of this machine, such as a reward's file, by its last name alone: nobody else has the rest."""
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def usage(has_adapters: bool) -> str:
    """Lines of Python that load the model from the folder of its card."""
    kind = "AutoPeftModelForCausalLM" if has_adapters else "AutoModelForCausalLM"
    return f"""\
from {"peft" if has_adapters else "transformers"} import {kind}
from transformers import AutoTokenizer

model = {kind}.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""


def _quality(lines: list[dict[str, Any]]) -> Iterator[str]:
    """A table of held-out columns at the first and the last evaluation; nothing where there was none."""
    evaluations = [line for line in lines if "eval_reward" in line]
    if not evaluations:
        return
    first, last = evaluations[0], evaluations[-1]
    names = [name for name in last if name.startswith("eval_") and not name.endswith(("/low", "/high"))]
    rows = [
        f"| {name.removeprefix('eval_')} | {_figure(first, name)} | {_figure(last, name)} |" for name in names
    ]
    yield "## Held-out quality"
    yield (
        "Greedy, on prompts that it was not trained on, with 95 % intervals:\n\n"
        f"| | step {first['step']} | step {last['step']} |\n|---|---|---|\n" + "\n".join(rows)
    )


def _figure(line: Mapping[str, Any], name: str) -> str:
    if line.get(name) is None:
        return ""
    low, high = line.get(f"{name}/low"), line.get(f"{name}/high")
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return f"{line[name]:.3f}{interval}"


def check_hub(repository: str) -> None:
    """Says at once where a push at the end is going to fail."""
    try:
        HfApi(endpoint()).whoami()
    except Exception as error:  # nobody is logged in, or no network: of several kinds
        logger.warning(
            "--push-to-hub {}: the hub cannot be reached as a user now ({}). The run goes on; {}",
            repository,
            _first_line(error),
            _by_hand(repository, "RUN/model"),
        )


def push(model: Path, repository: str, *, private: bool, leave_out: Sequence[str] = ()) -> None:
    """Upload a model's folder and say where it is. What stands in the way is a warning: nothing is lost.

    leave_out: names of files that stay here.
    """
    api = HfApi(endpoint())
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=model,
            commit_message="Trained by grpo-lean",
            ignore_patterns=[*leave_out],
        )
    except Exception as error:
        reason, way = _first_line(error), _by_hand(repository, str(shown(model)))
        logger.warning("the model could not be pushed to {} ({}); {}", repository, reason, way)
        return
    logger.info("pushed to {}/{}{}", api.endpoint, repository, ", private" if private else "")


def endpoint() -> str:
    """Returns the hub's address."""
    return constants.ENDPOINT


def _by_hand(repository: str, folder: str) -> str:
    return f"push it by hand: hf auth login; hf upload {repository} {folder}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
