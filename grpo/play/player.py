"""A model that plays: asked for moves in many games at once, or in one until somebody says stop."""

from collections.abc import Callable, Sequence
from dataclasses import replace as changed

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.play.thought import MOST_ANSWERS, Answer, Position, Thought, conclude, read_answer
from grpo.rollout.decoder import records_steps
from grpo.rollout.sample import rollout
from grpo.rollout.slots import KeptSlots
from grpo.rollout.tokens import step_uniforms
from grpo.types import Prompt
from rewards.formats import policy_prompt


class Player:
    """Moves by a model's answers to `P:` prompts.

    settings: of sampling, whose temperature is of first answers: whoever is asked again must not repeat
    itself, and samples at 1 if it did so greedily. rows: positions at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        *,
        trailing_space: bool = False,
        rows: int = 64,
    ) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._trailing_space, self._rows = trailing_space, rows
        is_recorded = records_steps(model.config, model.device.type)
        self._kept = KeptSlots() if is_recorded else None

    def think(
        self,
        positions: Sequence[Position],
        *,
        temperature: float | None = None,
        replace: bool = True,
        most_answers: int = MOST_ANSWERS,
        stopped: Callable[[], bool] | None = None,
    ) -> list[Thought]:
        """A move for each position, in none of which the game is over.

        temperature: in place of the settings'. replace: illegal answers, instead of resigning. stopped: asked
        after every token; what has been written by then is all there is to go by.
        """
        settings = self._settings if temperature is None else changed(self._settings, temperature=temperature)
        answers: list[list[Answer]] = [[] for _ in positions]
        asked = list(range(len(positions)))
        for attempt in range(most_answers if replace else 1):
            if attempt and settings.temperature == 0:
                settings = changed(settings, temperature=1.0)
            said = self._answer([positions[i] for i in asked], attempt, settings, stopped)
            for i, answer in zip(asked, said, strict=True):
                answers[i].append(answer)
            asked = [i for i in asked if not answers[i][-1].moves]
            if not asked or (stopped is not None and stopped()):
                break
        return [conclude(*each, replace=replace) for each in zip(positions, answers, strict=True)]

    def _answer(
        self,
        positions: Sequence[Position],
        attempt: int,
        settings: SamplingSettings,
        stopped: Callable[[], bool] | None,
    ) -> list[Answer]:
        fens = [position.board.fen() for position in positions]
        prompts = [Prompt(fen, policy_prompt(fen, trailing_space=self._trailing_space), {}) for fen in fens]
        # Each row's own, whichever games are beside it.
        uniforms = [
            step_uniforms(1, settings.max_new_tokens, seed=each.seed, step=each.board.ply(), draw=attempt)
            for each in positions
        ]
        written = rollout(
            self._model, self._tokenizer, prompts, torch.cat(uniforms), settings,
            rows=self._rows, kept=self._kept, stopped=stopped,
        )  # fmt: skip
        if self._kept is not None:  # as games end, there are fewer rows
            self._kept.trim(2 * self._kept.largest_nbytes)
        whole = (written.terminated | (written.lengths == settings.max_new_tokens)).tolist()
        return [
            read_answer(position, text, is_whole=is_whole)
            for position, text, is_whole in zip(positions, written.completions, whole, strict=True)
        ]
