"""A text file as training windows: bytes as they are, or tokens, memory-mapped either way.

The last tenth is held out. The bundled text is the training file of the bundled positions in another
order: there policy lines come first and environment lines after them, so that its last tenth would be held
out from what is not learned. Left out: several files, shuffled documents, anything but random windows.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import platformdirs
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor

from grpo.config import SettingsError
from grpo.data.load import POSITIONS
from grpo.errors import UserError
from grpo.files import as_path, replacing
from grpo.model.load import context_length, load_tokenizer
from grpo.workbench.models import model_shape
from grpo.workbench.settings import Task

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
        places = starts[:, None] + torch.arange(context + 1)
        return torch.from_numpy(self.ids[places.numpy()].astype(np.int64))


def open_corpus(settings: Task) -> Corpus:
    """The text as the model reads it: a made one in bytes, or with more entries in tokens of its own.

    SettingsError unless this model can learn from windows of this text.
    """
    path, shape, context = text_file(settings.data), model_shape(settings), settings.context
    reach, known = context_length(shape), shape.get_text_config(decoder=True).vocab_size
    if context > reach:
        raise SettingsError(
            f"context is {context}, but {settings.model_name} reaches {reach} tokens: give no more."
        )
    if not path.stat().st_size:
        raise SettingsError(f"data is {str(path)!r}, which is empty: give a text file.")
    tokenizer = None
    if settings.arch is None:
        tokenizer = load_tokenizer(settings.model_name).backend_tokenizer
    elif trained := trained_tokenizer(path, settings):
        tokenizer = Tokenizer.from_file(str(trained))
    corpus = Corpus(np.memmap(path, "uint8", mode="r"), BYTES)
    if tokenizer is not None:
        key = f"{_version(path)} {tokenizer.to_str()}"
        file = _cached(key, "uint32", partial(_encoded, path, tokenizer))
        corpus = Corpus(np.memmap(file, "uint32", mode="r"), tokenizer.get_vocab_size())
    if corpus.vocab > known:
        raise SettingsError(
            f"data has {corpus.vocab} different tokens, but the model's vocabulary has {known}: give --vocab "
            f"{corpus.vocab} or more, or a model whose tokenizer is used instead of bytes."
        )
    if (len(corpus.ids) - corpus.num_train - 1) // context < 1:
        raise SettingsError(
            f"data has {len(corpus.ids)} tokens; windows of {context}, a tenth of the file held out, need "
            f"{int((context + 1) / HELDOUT_SHARE) + 1}: give a longer file, or a smaller --context."
        )
    return corpus


def text_file(data: str | None) -> Path:
    """The file that --data means. SettingsError where there is none."""
    if data is None:
        raise SettingsError("data is not given, but --objective lm trains on a text: give --data FILE.")
    if data == BUNDLED_TEXT:
        lines = POSITIONS.joinpath("train.txt").read_text(encoding="utf-8").splitlines()
        random.Random(0).shuffle(lines)
        text = "\n".join(lines) + "\n"
        return _cached(text, "txt", text.encode)
    path = as_path(data)
    if not path.is_file():
        raise SettingsError(f"data is {data!r}, which is no file: give a text file.")
    return path


def trained_tokenizer(path: Path, settings: Task) -> Path | None:
    """The file of a tokenizer trained on the text, once, if the model has more entries than bytes.

    Byte-level BPE (Sennrich et al. 2016), the 256 bytes among its entries.
    """
    if settings.arch is None or settings.vocab <= BYTES:
        return None

    def train() -> bytes:
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(_texts(path), vocab_size=settings.vocab, show_progress=False)
        return tokenizer.to_str().encode()

    return _cached(f"{_version(path)} {settings.vocab}", "json", train)


def _encoded(path: Path, tokenizer: Tokenizer) -> bytes:
    parts = (tokenizer.encode(text, add_special_tokens=False).ids for text in _texts(path))
    return b"".join(np.array(ids, "uint32").tobytes() for ids in parts)


def _texts(path: Path) -> Iterator[str]:
    """The file in pieces of whole lines, about a MB each."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        while lines := file.readlines(_CHUNK_BYTES):
            yield "".join(lines)


def _version(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _cached(key: str, suffix: str, make: Callable[[], bytes]) -> Path:
    """A file of the user's cache directory, made where it is not there yet."""
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    try:
        path = platformdirs.user_cache_path("grpo-lean") / "corpora" / f"{name}.{suffix}"
    except RuntimeError as error:
        raise UserError(f"there is no folder for caches ({error}): set HOME, or XDG_CACHE_HOME") from error
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            file.write(make())
    return path
