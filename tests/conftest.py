"""Small models, prompts and files that several test modules share; all made in code, in seconds."""

import copy
import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TypeVar
from unittest import mock

import chess
import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # for matrices this small, more of them only wait for each other
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests everywhere; scripts/gpu_check.sh is for cards
import torch
from hypothesis import HealthCheck, settings
from loguru import logger
from prompt_lines import EnvironmentSample, PolicySample, environment_line, policy_line
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo.config import Config
from grpo.config.groups import Precision
from grpo.data.load import POSITIONS
from grpo.memory import Fit
from grpo.model.load import Policy, load_policy
from grpo.model.names import BUNDLED_FOLDER
from grpo.plan.workload import Workload
from grpo.scoring.logprobs import token_logprobs
from grpo.scoring.stream import Stream
from grpo.types import Prompt
from rewards.formats import policy_prompt

CONTEXT = 192
CPU = torch.device("cpu")

START_PROMPT = policy_prompt(chess.STARTING_FEN)
ENDGAME_PROMPT = policy_prompt("8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56")
MOVE_PROMPT = "A: 8/8/8/4k3/8/8/4P3/4K3 w - - 0 1+e2e4+e2e4+"
LONG_MOVE_PROMPT = (
    "A: rnbqkb1r/pppp1ppp/5n2/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3+f1c4+e2e4 e7e5 g1f3 g8f6 f1c4+"
)


QUIET = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("test", QUIET, derandomize=True, max_examples=50)
settings.register_profile("proof", QUIET, max_examples=1000)


def examples(count: int) -> settings:
    """So many examples of a property: the same each time; in `make proof` 20 times as many, new ones."""
    return settings(max_examples=count * (20 if settings.get_current_profile_name() == "proof" else 1))


def pytest_configure(config: pytest.Config) -> None:
    """Analyses are remembered from one run of the tests to the next, apart from the user's."""
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("user-cache"))


LONGEST = [
    "test_trl",
    "test_trace",
    "test_processes",
    "test_resume",
    "test_sampled",
    "test_split",
    "test_others",
    "test_another_device",
    "test_pages",
    "test_memory",
    "test_train",
    "test_scripts",
    "test_shard",
    "test_adapters",
    "test_decoding",
    "test_prompts",
    "test_start",
    "test_graphs",
    "test_find_and_calculate",
    "test_checkpointing",
    "test_setup",
    "test_refusals",
    "test_positions",
]
"""Modules that take longest, the longest first: processes that share the tests do not come to them last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


MAY_BE_SKIPPED = (
    "Stockfish is not installed",
    "there is no C++ compiler",
    "another C library than glibc",
    "this C library does without",
    "not on this system, or not permitted",
    "needs Linux",
    "TRL_TESTS names no file",
    "no chat model: ",
)
"""Reasons to skip, for things that a machine may be without. Any other reason fails: nobody would see what is
not tested."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _not_skipped_unseen((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _not_skipped_unseen((yield))


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _not_skipped_unseen(report: Report) -> Report:
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else None
    if reason is not None and not any(words in reason for words in MAY_BE_SKIPPED):
        report.outcome = "failed"
        report.longrepr = f"{reason}: not a reason that conftest.MAY_BE_SKIPPED lists"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many were skipped, by reason."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} not tested here: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The bundled model's: characters, the squares of moves, and pieces with the square they stand on."""
    return AutoTokenizer.from_pretrained(BUNDLED_FOLDER)


def _gpt2(vocabulary: int) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)  # dropout 0.1 and gelu_new, the defaults


def _llama(vocabulary: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _qwen(vocabulary: int) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


ARCHITECTURES: dict[str, Callable[[int], PreTrainedModel]] = {"gpt2": _gpt2, "llama": _llama, "qwen": _qwen}


@pytest.fixture(scope="session")
def model_folders(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Path]:
    """A Hugging Face folder for each of ARCHITECTURES, two layers of width 32."""
    folders = {}
    for name, make in ARCHITECTURES.items():
        torch.manual_seed(1)
        folders[name] = tmp_path_factory.mktemp("models") / name
        model = make(len(tokenizer))
        with torch.no_grad():  # at random, it would never end: let it, after some tokens nearly surely
            model.get_output_embeddings().weight[0].normal_(std=1.2)
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def learned_logprobs(model, stream: Stream, weights=None, **options) -> torch.Tensor:
    """Log-probs (R, C) of a stream. Gradients of their sum, weighted by `weights` (R, C), are added."""
    ones = torch.ones(len(stream.row), dtype=torch.float64)
    slopes = ones if weights is None else weights[stream.row, stream.place]
    return padded(stream, token_logprobs(model, stream, slope=lambda _, part: slopes[part], **options)[0])


def padded(stream: Stream, values: torch.Tensor) -> torch.Tensor:
    """Values (K,) of a stream's tokens in the shape of its rows (R, C), 0 where none is scored."""
    shape = stream.num_rows, stream.layout.longest_row
    return values.new_zeros(shape).index_put((stream.row, stream.place), values)


@pytest.fixture(scope="session")
def load(model_folders: dict[str, Path]) -> Callable[..., Policy]:
    """load("llama", "fp64"): as the trainer loads it, on the CPU; a copy of what is read once."""

    @cache
    def read(name: str, precision: Precision) -> Policy:
        return load_policy(str(model_folders[name]), CPU, precision)

    def loaded(name: str = "gpt2", precision: Precision = "fp32") -> Policy:
        policy = read(name, precision)
        policy = policy._replace(model=copy.deepcopy(policy.model))
        if precision == "fp64":
            let_norms_be_exact(policy.model)
        return policy

    return loaded


def let_norms_be_exact(model: PreTrainedModel) -> None:
    """Hugging Face's RMS norms compute in fp32 whatever comes in, which hides differences below 1e-7."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)


def _rms_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if type(module).__name__ == "Gemma3RMSNorm":
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + module.weight, module.eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Both tasks, from 40 to 110 tokens."""
    texts = [ENDGAME_PROMPT, LONG_MOVE_PROMPT, START_PROMPT, MOVE_PROMPT]
    return [Prompt(f"test:{row}", text, {}) for row, text in enumerate(texts, start=1)]


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 RookWorld lines of random endgames, labels made up but legal."""
    path = tmp_path_factory.mktemp("data") / "endgames.txt"
    path.write_text("\n".join(_lines(random.Random(0), 60)) + "\n")
    return path


def _lines(rng: random.Random, count: int) -> Iterator[str]:
    while count:
        board = chess.Board(None)
        pieces = [*rng.sample("QRBNqrbn", 2), "K", "k"]
        for square, piece in zip(rng.sample(range(64), len(pieces)), pieces, strict=True):
            board.set_piece_at(square, chess.Piece.from_symbol(piece))
        moves = [move.uci() for move in board.legal_moves]
        if not board.is_valid() or board.is_game_over() or len(moves) < 5:
            continue
        if count % 2:
            chosen = rng.sample(moves, 5)
            evals = [0.5, 0.4, 0.3, 0.2, 0.1]
            yield policy_line(PolicySample(board.fen(), chosen, evals, chosen[0]))
        else:
            move, before = chess.Move.from_uci(rng.choice(moves)), board.fen()
            board.push(move)
            yield environment_line(
                EnvironmentSample(before, move.uci(), [move.uci()], board.fen(), 0.001, 0, 0)
            )
        count -= 1


@pytest.fixture
def config(model_folders: dict[str, Path], data_file: Path, tmp_path: Path) -> Config:
    """A run of a second: 2 steps of 8 completions without engine or trackers."""
    return Config(
        steps=2,
        batch_size=8,
        group_size=4,
        model=str(model_folders["gpt2"]),
        device="cpu",
        precision="fp32",
        prompts=str(data_file),
        heldout_share=0.2,
        engine="off",
        max_new_tokens=10,
        kl_coef=0.05,
        eval_interval=0,
        eval_prompts=4,
        runs_dir=tmp_path / "runs",
        name="test",
        checkpoint_interval=0,
        trackers=(),
        logged_completions=4,
    )


@pytest.fixture
def quick_flags(model_folders: dict[str, Path], data_file: Path) -> list[object]:
    """Flags for a run of seconds, but for its steps."""
    return [
        "--model",
        model_folders["gpt2"],
        "--prompts",
        data_file,
        "--heldout-share",
        0.2,
        "--engine",
        "off",
        "--batch-size",
        8,
        "--group-size",
        4,
        "--max-new-tokens",
        8,
        "--eval-interval",
        0,
    ]


@pytest.fixture(scope="session")
def command_of_seconds(model_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run that saves each step, on a tiny model and 80 of the bundled lines: for tests/proof."""
    lines = POSITIONS.joinpath("train.txt").read_text().splitlines()
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("\n".join(lines[:40] + lines[-40:]))
    given = {
        "model": model_folders["gpt2"],
        "prompts": prompts,
        "engine": "off",
        "precision": "fp32",
        "batch-size": 8,
        "group-size": 4,
        "max-new-tokens": 8,
        "eval-interval": 2,
        "eval-prompts": 4,
        "heldout-share": 0.2,
        "checkpoint-interval": 1,
        "device": "cpu",
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + ["--trackers"]


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Objects of imports need not be looked through at each collection, as in a training run."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def untraced(row_bytes: float = 1e5, *, counted: bool = False) -> Iterator[None]:
    """Memory plans from made-up peaks, in place of a warm-up's passes.

    Nor, unless `counted`, are tensors counted one by one.
    """

    def made_up(fit: Fit, work: Workload, pass_at: object, **options: object) -> None:
        for phase in work.phases:
            for groups in (1, 64):
                size = work.size(groups * work.config.group_size, phase)
                fit.see(phase, size, row_bytes * size.rows)
            fit.plan(phase, work.size(work.rows_here, phase))

    uncounted = nullcontext() if counted else mock.patch.object(Fit, "_counts", Fit._teaches)
    with mock.patch("grpo.run.planning.warm_up", made_up), uncounted:
        yield


@pytest.fixture
def made_up_plans() -> Iterator[None]:
    """For runs whose memory plan is not what is tested."""
    with untraced():
        yield


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Lines that are logged during a test, "WARNING text" and so on."""
    messages: list[str] = []
    sink = logger.add(lambda message: messages.append(str(message).rstrip()), format="{level} {message}")
    yield messages
    logger.remove(sink)


@pytest.fixture
def own_accelerator():
    """TRL's trainers share accelerate's state: what one leaves is no other module's."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
