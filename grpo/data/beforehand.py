"""What can be known of prompts and rewards before anything large is loaded, which takes seconds."""

import json
from importlib import resources
from itertools import islice
from pathlib import Path

from grpo.config import Config, SettingsError
from grpo.config.groups import BUNDLED
from grpo.data.asking import NO_CHAT_TEMPLATE, Asking
from grpo.data.files import file_rows
from grpo.data.intake import Intake
from grpo.data.load import check_spec, is_file
from grpo.data.reward_files import PROMPTS_LOOKED_AT, check_columns, load_rewards
from grpo.prompt import Prompt


def check_beforehand(config: Config) -> None:
    """ValueError for prompts, templates and rewards that are not there, or not for each other."""
    functions = load_rewards(config.reward, config.reward_weights)
    check_spec(config.prompts)
    Asking(config)
    prompts: list[Prompt] = []
    if is_file(config.prompts):
        intake = Intake(config.prompts, max_bad_share=config.max_bad_share, settings=config)
        rows = file_rows(Path(config.prompts).expanduser())
        for row_id, content, convert in islice(rows, PROMPTS_LOOKED_AT):
            prompts += intake.prompts(row_id, content, convert)
        if intake.num_rows < PROMPTS_LOOKED_AT or not prompts:  # of a longer one the others may be good
            intake.check()
    check_columns(functions, prompts)
    if config.chats or any(prompt.messages for prompt in prompts):
        _check_chat_template(config)


def _check_chat_template(config: Config) -> None:
    """SettingsError where a model in a folder, or the bundled one, is known to have none."""
    if config.chat_template is not None:
        return
    bundled = Path(str(resources.files("grpo"))) / "assets" / BUNDLED
    folder = bundled if config.model == BUNDLED else Path(config.model)
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or (folder / "chat_template.jinja").is_file():
        return
    if not json.loads(settings.read_text(encoding="utf-8")).get("chat_template"):
        raise SettingsError(NO_CHAT_TEMPLATE)
