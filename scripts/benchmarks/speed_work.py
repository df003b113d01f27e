"""The models and prompts of the speed benchmark: all contenders do the same work."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import chess
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from grpo.data import load_prompts
from grpo.model.names import BUNDLED_FOLDER
from grpo.types import Prompt
from rewards.formats import environment_prompt, policy_prompt

ModelName = Literal[
    "rook-tiny", "rook-tiny without end", "GPT-2 124 M without end", "Qwen's kind without end"
]
QWEN = Qwen2Config(
    vocab_size=32_000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip
OWN_REWARD = "reward.py"
"""In the folder, where prompts are no positions: `variety` of a completion's letters."""
_NUM_PROMPTS = 128
_COLUMNS = ("fen", "moves", "evals", "action", "history")


def prepare(name: ModelName, prompt_tokens: int | None, folder: Path) -> tuple[Path, Path, Path]:
    """The model's folder, our prompts and TRL's, half of them policy prompts.

    TRL mis-scores prompts of mixed lengths on GPT-2: those of both are of one length, where `prompt_tokens`
    is None the most common one of the bundled prompts.
    """
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    model = BUNDLED_FOLDER
    if name != "rook-tiny":
        model = folder / "model"
        _model_without_end(name).save_pretrained(model)
        tokenizer.save_pretrained(model)
    if name == "Qwen's kind without end":
        (folder / OWN_REWARD).write_text(_VARIETY)
        rng = random.Random(0)  # letters of pieces, each a token
        texts = ("".join(rng.choices("pnbrqk", k=prompt_tokens or 1)) for _ in range(_NUM_PROMPTS))
        prompts = _write(folder / "prompts.jsonl", ({"prompt": text} for text in texts))
        return model, prompts, prompts
    source = _games() if prompt_tokens else load_prompts("bundled", policy_share=0.5, seed=0).draw(8000)
    equal = _of_length(source, prompt_tokens, tokenizer)
    ours, theirs = folder / "ours.jsonl", folder / "trl.jsonl"
    return model, _write_positions(ours, equal), _write_prompts(theirs, equal)


def _model_without_end(name: ModelName) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "GPT-2 124 M without end":
        return without_end(GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0)))
    if name == "Qwen's kind without end":
        return qwen_without_end()
    return without_end(AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER, dtype=torch.float32))


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    """The same GPT-2, but for one feature that from now on says that a text never ends."""
    with torch.no_grad():
        embeddings, norm = model.transformer.wte.weight, model.transformer.ln_f
        norm.weight[0], norm.bias[0] = 0.0, 1.0
        embeddings[:, 0] = 0.0
        embeddings[model.config.eos_token_id, 0] = -1e4
    return model


def qwen_without_end() -> PreTrainedModel:
    """Random weights, but for one feature, which layers leave as it is, and which says no end."""
    model = AutoModelForCausalLM.from_config(QWEN, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[QWEN.eos_token_id, 0] = -1e4
    return model


_VARIETY = """
def variety(completions, **columns):
    return [len(set(completion)) / 100 for completion in completions]
"""


def _games() -> Iterator[Prompt]:
    """Both prompts of every position of random games; labels are made up, but legal."""
    rng = random.Random(0)
    while True:
        board = chess.Board()
        while not board.is_game_over() and len(board.move_stack) < 150:
            move = rng.choice(list(board.legal_moves)).uci()
            moves = [each.uci() for each in islice(board.legal_moves, 5)]
            evals = [0.1 * rank for rank in range(len(moves))]
            fen = board.fen()
            yield Prompt("", policy_prompt(fen), {"fen": fen, "moves": moves, "evals": evals})
            yield Prompt(
                "", environment_prompt(fen, move, [move]), {"fen": fen, "action": move, "history": [move]}
            )
            board.push_uci(move)


def _of_length(
    prompts: Iterator[Prompt] | Sequence[Prompt], length: int | None, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """As many policy as environment prompts of that many tokens; None: of the most common number."""
    found: dict[tuple[str, int], list[Prompt]] = {}

    def pairs(tokens: int) -> int:
        return min(len(found.get((kind, tokens), [])) for kind in ("P:", "A:"))

    for prompt in prompts:
        tokens = len(tokenizer(prompt.text)["input_ids"])
        found.setdefault((prompt.text[:2], tokens), []).append(prompt)
        if length is not None and 2 * pairs(length) >= _NUM_PROMPTS:
            break
    chosen = max({tokens for _, tokens in found}, key=pairs) if length is None else length
    both = zip(found["P:", chosen], found["A:", chosen], strict=False)
    return [prompt for pair in both for prompt in pair][:_NUM_PROMPTS]


def _write_positions(file: Path, prompts: Sequence[Prompt]) -> Path:
    """Rows from which our own source makes the prompts."""
    return _write(file, [{name: p.columns[name] for name in _COLUMNS if name in p.columns} for p in prompts])


def _write_prompts(file: Path, prompts: Sequence[Prompt]) -> Path:
    """Rows for a dataset: the same columns in each."""
    return _write(
        file, [{"prompt": p.text} | {name: p.columns.get(name) for name in _COLUMNS} for p in prompts]
    )


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
