"""A model that is evaluated or plays: asked, judged and computed as its run was, if it has one."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from loguru import logger
from transformers import PreTrainedModel

from grpo.config import Config
from grpo.config.groups import Precision
from grpo.data import PromptSource, load_prompts
from grpo.data.kept_files import settings_of_run, with_prompts
from grpo.data.reward_files import resolve_max_new_tokens
from grpo.model.load import Policy, context_length, load_policy
from grpo.model.target import choose_device, choose_model
from grpo.rollout.decoder import make_sampler
from grpo.run.folder import model_of, step_of
from grpo.run.loading import prompt_room
from grpo.scoring.model_checks import check_scorer


@dataclass(frozen=True)
class TrainedModel:
    """A model by its name, and the settings by which it is asked; weights are loaded when they are needed."""

    name: str
    """A hub id, or the folder with its weights, which of a run is its `model/`."""
    step: str
    """The step that a run has come to, such as step-000050; empty for any other model."""
    settings: Config
    device: torch.device

    @staticmethod
    def of(
        model: str,
        device_name: str,
        settings: Config | None = None,
        *,
        prompts: str | None = None,
        precision: Precision | None = None,
    ) -> "TrainedModel":
        """model: auto, rook-tiny, a hub id, a model's folder, or a run's.

        settings: None: those of its run, or the defaults. prompts, precision: None: the settings'.
        """
        device = choose_device(device_name)
        if settings is None:
            settings = settings_of_run(model) or Config()
        if prompts is not None:
            settings = with_prompts(settings, prompts)
        settings = resolve_max_new_tokens(settings)
        if precision is not None:
            settings = replace(settings, precision=precision)
        trained = TrainedModel(choose_model(model_of(model), device), step_of(model), settings, device)
        logger.info("the model is {}{}", trained.name, f", which is {trained.step}" if trained.step else "")
        return trained

    def prompts(self, *, seed: int, heldout_count: int) -> PromptSource:
        """The prompts that the settings name, without those that the model has no room for."""
        settings = self.settings
        return load_prompts(
            settings.prompts,
            seed=seed,
            heldout_share=settings.heldout_share,
            heldout_count=heldout_count,
            max_bad_share=settings.max_bad_share,
            settings=settings,
            room=prompt_room(self.name, settings.max_new_tokens),
            to_train=False,
        )

    @cached_property
    def policy(self) -> Policy:
        """The model with its tokenizer, loaded and checked. ValueError says what to do when it cannot be."""
        policy = load_policy(self.name, self.device, self.settings.precision)
        check_scorer(policy.model, context_length(policy.model.config))  # its head, too
        return policy

    @cached_property
    def sampler(self) -> PreTrainedModel:
        """The model as it decodes best."""
        return make_sampler(self.policy)
