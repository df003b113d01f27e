"""A model that plays: asked for moves in many games at once, or in one until somebody says stop."""

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from pathlib import Path

import chess
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.errors import UserError
from grpo.model.load import context_length
from grpo.play.thought import MOST_ANSWERS, GamePosition, MoveChoice, choose_move, read_answer
from grpo.rewards import policy_prompt
from grpo.rollout.decoder import ArenaCache, records_steps
from grpo.rollout.sample import begin_rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.folder import step_of
from grpo.run.trained import TrainedModel
from grpo.types import Prompt

_LONGEST_PROMPT = 96
"""Tokens, were each letter of a position one."""


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
        self._arena = ArenaCache() if records_steps(model.config, model.device.type) else None

    def think(
        self,
        positions: Sequence[GamePosition],
        *,
        temperature: float | None = None,
        replace: bool = True,
        most_answers: int = MOST_ANSWERS,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[MoveChoice]:
        """A move for each position, in none of which the game is over.

        temperature: in place of the settings'. replace: illegal answers, instead of resigning. stopped: asked
        after every token; what has been written by then is all there is to go by.
        """
        settings = self._settings if temperature is None else changed(self._settings, temperature=temperature)
        answers: list[list[MoveChoice]] = [[] for _ in positions]
        unanswered = list(range(len(positions)))
        for attempt in range(most_answers if replace else 1):
            if attempt and settings.temperature == 0:
                settings = changed(settings, temperature=1.0)
            asked = [positions[i] for i in unanswered]
            for i, answer in zip(unanswered, self._answer(asked, attempt, settings, stopped), strict=True):
                answers[i].append(answer)
            unanswered = [i for i in unanswered if not answers[i][-1].evals]
            if not unanswered or stopped():
                break
        return [choose_move(*pair, replace=replace) for pair in zip(positions, answers, strict=True)]

    def prompts(self, boards: Sequence[chess.Board]) -> list[Prompt]:
        """The prompts by which the model is asked for moves, each known by its FEN."""
        fens = [board.fen() for board in boards]
        return [Prompt(fen, policy_prompt(fen, trailing_space=self._trailing_space), {}) for fen in fens]

    def _answer(
        self,
        positions: Sequence[GamePosition],
        attempt: int,
        settings: SamplingSettings,
        stopped: Callable[[], bool],
    ) -> list[MoveChoice]:
        uniforms = [  # each row's own, whichever games are beside it
            step_uniforms(1, settings.max_new_tokens, seed=seed, step=board.ply(), draw=attempt)
            for board, seed in positions
        ]
        prompts = self.prompts([board for board, _ in positions])
        sampling = begin_rollout(
            self._model,
            self._tokenizer,
            prompts,
            torch.cat(uniforms),
            settings,
            rows=self._rows,
            reusable=self._arena,
        )
        for _ in sampling:
            if stopped():
                sampling.stop()
        written = sampling.batch(prompts)
        whole = (written.terminated | (written.lengths == settings.max_new_tokens)).tolist()
        return [
            read_answer(position, text, is_whole=is_whole)
            for position, text, is_whole in zip(positions, written.texts, whole, strict=True)
        ]


def display_name(model: str) -> str:
    """A model's name as people see it: a folder's last part, and of a run the step that it has come to."""
    if not Path(model).is_dir():
        return model
    return f"{Path(model).resolve().name} {step_of(model)}".rstrip()


def make_player(model: TrainedModel, *, temperature: float = 0.0, rows: int = 64) -> Player:
    """A player that asks a model as its run did. ValueError says what to do when it cannot be loaded."""
    settings, room = model.settings, context_length(model.policy.model.config) - _LONGEST_PROMPT
    if room < 1:
        raise UserError(f"model {model.name!r} has a context too short for a position: give another one")
    tokens = min(settings.max_new_tokens, room)
    return Player(
        model.sampler,
        model.policy.tokenizer,
        SamplingSettings.of(settings, temperature=temperature, max_new_tokens=tokens),
        trailing_space=settings.trailing_space,
        rows=rows,
    )
