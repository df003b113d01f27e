"""A text file as training windows: bytes as they are, or tokens, memory-mapped either way.

The last tenth is held out. The bundled text is the training file of the bundled positions in another
order: there policy lines come first and environment lines after them, so that its last tenth would be held
out from what is not learned. Left out: several files, shuffled documents, anything but random windows.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor

from grpo.config import Config, SettingsError
from grpo.data.load import POSITIONS
from grpo.files import replacing, write_whole
from grpo.model.load import context_length, load_tokenizer
from grpo.workbench.task import MadeModel, model_name, model_shape

BUNDLED_TEXT = "bundled"
BYTES = 256
"""Vocabulary of a byte-level corpus."""
HELDOUT_SHARE = 0.1
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Corpus:
    """Token ids, on disk, and how many different ones there may be."""

    ids: np.ndarray
    vocab: int

    @property
    def num_train(self) -> int:
        """Tokens that training windows are cut from."""
        return len(self.ids) - int(HELDOUT_SHARE * len(self.ids))

    def train_windows(self, count: int, context: int, generator: torch.Generator) -> Tensor:
        """(count, context + 1) random windows."""
        return self._windows(torch.randint(self.num_train - context, (count,), generator=generator), context)

    def heldout_windows(self, at_most: int, context: int) -> Tensor:
        """(N, context + 1): the held-out part from its start, in windows side by side."""
        room = len(self.ids) - self.num_train
        starts = self.num_train + torch.arange(min(at_most, (room - 1) // context)) * context
        return self._windows(starts, context)

    def _windows(self, starts: Tensor, context: int) -> Tensor:
        rows = [self.ids[start : start + context + 1].astype(np.int64) for start in starts.tolist()]
        return torch.from_numpy(np.stack(rows))

    def check(self, vocab: int, context: int) -> None:
        """SettingsError unless a model of `vocab` entries can be trained on windows of `context` tokens."""
        if self.vocab > vocab:
            raise SettingsError(
                f"data has {self.vocab} different tokens, but the model's vocabulary has {vocab}: "
                f"give --vocab {self.vocab} or more, or a model whose tokenizer is used instead of bytes."
            )
        if (len(self.ids) - self.num_train - 1) // context < 1:
            needed = int((context + 1) / HELDOUT_SHARE) + 1
            raise SettingsError(
                f"data has {len(self.ids)} tokens; windows of {context}, a tenth of the file held out, "
                f"need {needed}: give a longer file, or a smaller --context."
            )


def check_file(path: Path | None) -> Path:
    """The corpus's file. SettingsError where there is none."""
    if path is None:
        raise SettingsError("data is not given, but --objective lm trains on a text: give --data FILE.")
    if not path.is_file():
        raise SettingsError(f"data is {str(path)!r}, which is no file: give a text file.")
    return path


def open_corpus(data: str | None, train: Config, made: MadeModel) -> Corpus:
    """The text as the model reads it. With --vocab above 256 a tokenizer is trained on it, once.

    SettingsError unless this model can learn from windows of this text.
    """
    path, config = text_file(data), model_shape(train, made)
    if made.context > context_length(config):
        raise SettingsError(
            f"context is {made.context}, but {model_name(train, made)} reaches {context_length(config)} "
            "tokens: give no more."
        )
    if tokenizer := trained_tokenizer(path, made):
        corpus = token_corpus(path, Tokenizer.from_file(str(tokenizer)))
    elif made.arch is None:
        corpus = token_corpus(path, load_tokenizer(model_name(train, made)).backend_tokenizer)
    else:
        corpus = byte_corpus(path)
    corpus.check(config.get_text_config(decoder=True).vocab_size, made.context)
    return corpus


def text_file(data: str | None) -> Path:
    """The file that --data means. SettingsError where there is none."""
    if data != BUNDLED_TEXT:
        return check_file(Path(data).expanduser() if data else None)
    lines = POSITIONS.joinpath("train.txt").read_text().splitlines()
    random.Random(0).shuffle(lines)
    text = "\n".join(lines) + "\n"
    path = _cached(text.encode(), "txt")
    if not path.exists():
        _write(path, text)
    return path


def trained_tokenizer(path: Path, made: MadeModel) -> Path | None:
    """The file of a tokenizer trained on the text, if the model is made with more entries than bytes."""
    if made.arch is None or made.vocab <= BYTES:
        return None
    stat = path.stat()
    file = _cached(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {made.vocab}".encode(), "json")
    if not file.exists():
        _write(file, train_tokenizer(path, made.vocab).to_str())
    return file


def _cached(key: bytes, suffix: str) -> Path:
    name = hashlib.sha256(key).hexdigest()[:24]
    return platformdirs.user_cache_path("grpo-lean") / "corpora" / f"{name}.{suffix}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def byte_corpus(path: Path) -> Corpus:
    """The file's bytes; nothing is read until it is used."""
    check_file(path)
    if not path.stat().st_size:
        raise SettingsError(f"data is {str(path)!r}, which is empty: give a text file.")
    return Corpus(np.memmap(path, np.uint8, mode="r"), BYTES)


def token_corpus(path: Path, tokenizer: Tokenizer) -> Corpus:
    """The file's tokens, encoded once and kept in the user's cache directory."""
    check_file(path)
    vocab = tokenizer.get_vocab_size()
    dtype = np.uint16 if vocab <= 2**16 else np.uint32
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {tokenizer.to_str()}"
    file = _cached(key.encode(), "bin")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "wb") as out:
            for text in _texts(path):
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                out.write(np.array(ids, dtype).tobytes())
    if not file.stat().st_size:
        raise SettingsError(f"data is {str(path)!r}, which is empty: give a text file.")
    return Corpus(np.memmap(file, dtype, mode="r"), vocab)


def train_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016) of at most `vocab` entries, the 256 bytes among them."""
    check_file(path)
    if vocab < BYTES:
        raise SettingsError(f"vocab is {vocab}: a byte-level tokenizer has at least {BYTES} entries.")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(_texts(path), vocab_size=vocab, show_progress=False)
    return Tokenizer.from_str(tokenizer.to_str())


def _texts(path: Path) -> Iterator[str]:
    """The file in pieces of whole lines, about a MB each."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        while lines := file.readlines(_CHUNK_BYTES):
            yield "".join(lines)
