"""Inputs of a run that are handed to it in Python: a loaded model, rows of prompts, reward functions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config import Config, SettingsError
from grpo.config.groups import BUNDLED
from grpo.data.gym import rewards_for
from grpo.data.load import IN_MEMORY, Rows, is_file
from grpo.data.reward_files import RewardFunction, load_rewards, reward_file
from grpo.files import as_path
from grpo.model.load import ModelSource
from grpo.model.names import BASE_FOLDER
from grpo.model.target import AUTO


@dataclass(frozen=True)
class Inputs:
    """Things, or their names; what is left out the settings name."""

    model: str | PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: str | Rows | None = None
    rewards: Sequence[str | RewardFunction] = ()
    is_trial: bool = False
    """Rows of the settings are taken at their word, to run out of memory is an error, and nothing is saved:
    for whoever wants to know what fits, or how a few steps go."""

    def named_in(self, config: Config) -> Config:
        """The settings, with the names of what is here; files and folders so that they are found anywhere."""
        model = config.model if self.model is None else self.model
        prompts = config.prompts if self.prompts is None else self.prompts
        if not isinstance(model, str):
            model = getattr(getattr(model, "config", None), "_name_or_path", "") or IN_MEMORY
        if not isinstance(prompts, str):
            prompts = IN_MEMORY
        rewards = load_rewards(self.rewards) if self.rewards else rewards_for(prompts, config.reward)
        return replace(
            config,
            model=model if model in (AUTO, BUNDLED) else _absolute(model),
            prompts=_absolute(prompts) if is_file(prompts) else prompts,
            reward=tuple(map(_absolute_reward, rewards)),
            prompt_template=config.prompt_template and config.prompt_template.resolve(),
            chat_template=config.chat_template and config.chat_template.resolve(),
        )

    def model_source(self, config: Config) -> ModelSource:
        """A resumed run's own base, where it has one, serves wherever the first one has gone.

        SettingsError for a model that is none of transformers', has adapters, or is wanted in 4 bits.
        """
        if self.model is None or isinstance(self.model, str):
            base = config.resume / BASE_FOLDER if config.resume else None
            name = str(base) if base is not None and base.is_dir() else config.model
            return ModelSource(name, tokenizer=self.tokenizer)
        if not isinstance(self.model, PreTrainedModel):
            raise SettingsError(
                f"model is a {type(self.model).__name__}: give a name, or a model of transformers' without "
                "adapters (lora_rank makes them)."
            )
        if config.load_in_4bit:
            raise SettingsError(
                "load_in_4bit is True, but the model is loaded already: give its name or folder, to be read "
                "in 4 bits."
            )
        return ModelSource(config.model, self.model, self.tokenizer)


def _absolute(name: str) -> str:
    path = as_path(name)
    return str(path.resolve()) if path.exists() else name


def _absolute_reward(spec: str) -> str:
    path, name = reward_file(spec)
    return f"{path.resolve()}:{name}" if path is not None and path.is_file() else spec
