"""Files that are there whole or as they were, whatever ends their writing."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write to, which takes the place of `path` when all is on the disk. OSError if that fails.

    Processes that write the same at once do not meet: the last one's stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with replacing(path) as file:
        file.write(text)


def replace_folder(new: Path, place: Path) -> None:
    """Let a folder take the place of another, which is set aside first and goes last.

    So whatever ends the process, one of the two is on the disk; what was set aside is put back by
    `restore_interrupted_replace`.
    """
    backup = place.with_name(f".{place.name}{_ASIDE}")
    shutil.rmtree(backup, ignore_errors=True)
    if place.exists():
        os.rename(place, backup)
    os.rename(new, place)
    shutil.rmtree(backup, ignore_errors=True)


def restore_interrupted_replace(folder: Path) -> None:
    """Puts back what a killed process has set aside in `folder`; where another has its place, it goes."""
    for backup in folder.glob(f".*{_ASIDE}"):
        place = folder / backup.name.removeprefix(".").removesuffix(_ASIDE)
        if place.exists():
            shutil.rmtree(backup, ignore_errors=True)
        else:
            os.rename(backup, place)


def as_path(name: str | Path) -> Path:
    """A file or folder as a person names it: ~ and $VARIABLES, which no shell has replaced in YAML."""
    return Path(os.path.expanduser(os.path.expandvars(name)))


def shown(path: Path) -> Path:
    """A path as a person would name it in the present folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


_ASIDE = ".aside"
