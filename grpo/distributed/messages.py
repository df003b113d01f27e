"""What processes tell each other, as bytes: JSON, with the numbers of tensors and arrays behind it.

Nothing here can name code to run, as a pickle can. What does not have this form is a ValueError.
"""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.types import EXCHANGED

_HEAD = struct.Struct(">I")
_PLAIN = (type(None), bool, int, float, str)
_NUMBERS = "biuf"
"""Kinds of array whose bytes are numbers."""


def pack(value: Any) -> bytes:
    """TypeError for what is neither plain, nor tensors and arrays, nor one of `EXCHANGED`."""
    tail: list[bytes] = []
    head = json.dumps(_described(value, tail)).encode()
    return zlib.compress(_HEAD.pack(len(head)) + head + b"".join(tail), 1)


def unpack(message: bytes) -> Any:
    """What was packed."""
    try:
        content = zlib.decompress(message)
        (length,) = _HEAD.unpack_from(content)
        head, tail = content[_HEAD.size : _HEAD.size + length], content[_HEAD.size + length :]
        return _made(json.loads(head), _taker(tail))
    except (zlib.error, struct.error, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {type(error).__name__}: {error}") from error


def _described(value: Any, tail: list[bytes]) -> Any:
    def all_of(values: Any) -> list[Any]:
        return [_described(each, tail) for each in values]

    match value:
        case Tensor():
            plain = value.detach().cpu().contiguous()
            tail.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
            return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape)]}
        case np.ndarray() if value.dtype.kind in _NUMBERS:
            tail.append(value.tobytes())
            return {"array": [value.dtype.str, list(value.shape)]}
        case np.generic() if value.dtype.kind in _NUMBERS:
            return value.item()
        case bytes():
            tail.append(value)
            return {"bytes": len(value)}
        case Path():
            return {"path": str(value)}
        case tuple():
            return {"tuple": all_of(value)}
        case list():
            return all_of(value)
        case dict():
            return {"dict": [all_of(pair) for pair in value.items()]}
    if type(value) in _PLAIN:
        return value
    name = type(value).__name__
    if is_dataclass(value) and EXCHANGED.get(name) is type(value):
        return {"record": [name, all_of(getattr(value, field.name) for field in fields(value))]}
    raise TypeError(f"processes cannot tell each other a {name}.")


def _made(described: Any, take: Callable[[int], bytes]) -> Any:
    if isinstance(described, _PLAIN):
        return described
    if isinstance(described, list):
        return [_made(each, take) for each in described]
    ((kind, of),) = described.items()
    match kind:
        case "tensor":
            dtype = getattr(torch, str(of[0]))
            content = bytearray(take(int(np.prod(of[1], dtype=np.int64)) * dtype.itemsize))
            return (
                torch.frombuffer(content, dtype=dtype).view(of[1])
                if content
                else torch.empty(of[1], dtype=dtype)
            )
        case "array":
            kind = np.dtype(of[0])
            return (
                np.frombuffer(take(int(np.prod(of[1], dtype=np.int64)) * kind.itemsize), kind)
                .reshape(of[1])
                .copy()
            )
        case "bytes":
            return take(of)
        case "path":
            return Path(of)
        case "tuple":
            return tuple(_made(of, take))
        case "dict":
            return {_made(name, take): _made(value, take) for name, value in of}
        case "record":
            return EXCHANGED[of[0]](*_made(of[1], take))
    raise ValueError(f"not a message: {kind!r} is no kind of value")


def _taker(tail: bytes) -> Callable[[int], bytes]:
    """Parts of `tail`, from its beginning to its end."""
    place = 0

    def take(count: int) -> bytes:
        nonlocal place
        if not 0 <= count <= len(tail) - place:
            raise ValueError(f"not a message: {count} bytes where {len(tail) - place} are left")
        place += count
        return tail[place - count : place]

    return take
