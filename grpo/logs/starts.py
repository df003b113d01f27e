"""The start of a run, for its records: date, machine, versions, commit and command."""

import json
import platform
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from loguru import logger

STARTS_FILE = "starts.jsonl"
"""In a run's folder: a line for each start, the resumed ones among them."""
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "python-chess", "chess")
_GIT_PATIENCE_S = 5.0


def log_start(folder: Path, device: torch.device, step: int) -> None:
    """Add this start to a run's folder. step: the last one that is finished. A full disk is a warning."""
    record = {
        "step": step,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "device": device_name(device),
        "python": platform.python_version(),
        **package_versions(),
        "grpo-lean": code_version(),
        "commit": git_commit(Path()),
        "command": shlex.join(sys.argv),
    }
    try:
        with (folder / STARTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        logger.warning("{} cannot be written ({}); training goes on", folder / STARTS_FILE, error.strerror)


def package_versions() -> dict[str, str]:
    """The versions of the packages that compute, as far as they are installed."""
    versions = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def code_version() -> str:
    """This package's version, and of a clone its commit."""
    clone = Path(__file__).parents[2]
    commit = git_commit(clone) if (clone / ".git").exists() else None
    try:
        installed = version("grpo-lean")
    except PackageNotFoundError:
        installed = "not installed"
    return f"{installed}, commit {commit}" if commit else installed


def git_commit(folder: Path) -> str | None:
    """The commit that a folder's repository is at, with -dirty where files differ; None without one."""
    describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    command = ["git", "--no-optional-locks", "-C", str(folder), *describe]  # to look at it changes nothing
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip() or None


def device_name(device: torch.device) -> str:
    """The card, or the processor with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} ({platform.machine()})"
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return f"{processor}, {torch.get_num_threads()} threads"
