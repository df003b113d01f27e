"""One step of every kind of causal language model that transformers lists: `python scripts/models_page.py`.

Each is made tiny, with random weights, in a process of its own whose memory is limited. It passes if the
log-probs of sampler and scorer, and the gradient, are those of its own forward pass, however many rows go
through at once, or if it is refused in words. docs/models.md is the table of what was found; 1 is returned if
a kind neither passes nor is refused.
"""

import json
import os
import re
import resource
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import transformers
import tyro
from benchmarks.kinds import EXACTNESS, PROMPTS, tiny, what_is_wrong
from benchmarks.ways import NEW_TOKENS, Speed, processor, speeds
from loguru import logger
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo.errors import UserError
from grpo.model.load import context_length
from grpo.model.ways import decoding_of, reading_of
from grpo.rollout.decoder import check_decoder
from grpo.scoring.model_checks import check_scorer

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MEMORY_BYTES, SECONDS = 6 * 2**30, 600


class Found(NamedTuple):
    """The result of one kind."""

    kind: str
    verdict: Literal["trains", "refused", "not made", "wrong"]
    scored: str = ""
    sampled: str = ""
    words: str = ""
    """Why it is no faster, what it was refused for, or what is wrong."""


def main(
    kinds: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    page: Path = PAGE,
    here: bool = False,
    at_once: int = 2,
) -> int:
    """Train one step of each kind and write the page; 1 if any came out wrong.

    Args:
        kinds: Those to try; none given: all that transformers lists. The page is written of all alone.
        page: Where to write it.
        here: Try one kind in this process, and print what was found.
        at_once: Processes at once.
    """
    if here:
        print(json.dumps(_try(kinds[0])))
        return 0
    chosen = kinds or tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    begun = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        results = [*pool.map(_in_a_process, chosen)]
    if not kinds:
        page.write_text(page_of(results, speeds()), encoding="utf-8")
    for found in results:
        if kinds or found.verdict == "wrong":
            print(*found, sep=" | ")
    counts = {
        verdict: sum(found.verdict == verdict for found in results)
        for verdict in ("trains", "refused", "not made", "wrong")
    }
    print(f"{counts} of {len(chosen)} kinds in {(time.monotonic() - begun) / 60:.0f} min")
    return int(counts["wrong"] > 0)


def _in_a_process(kind: str) -> Found:
    command = [sys.executable, __file__, kind, "--here"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return Found(kind, "wrong", words=f"no end within {SECONDS} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Found(kind, "wrong", words=f"exit status {done.returncode}: {last}")
    return Found(*json.loads(done.stdout.splitlines()[-1]))


def _try(kind: str) -> Found:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    lines = list[str]()
    logger.remove()
    logger.add(lambda line: lines.append(line.record["message"]), level="INFO")
    try:
        model = tiny(kind)
        model(torch.tensor([PROMPTS[0]]))
    except Exception as error:
        return Found(kind, "not made", words=f"{type(error).__name__}: {error}".splitlines()[0])
    try:
        check_scorer(model, context_length(model.config))
        check_decoder(model)
    except UserError as error:
        return Found(kind, "refused", words=str(error).partition(" here: ")[2].partition(", so its head")[0])
    ways = reading_of(model), decoding_of(model.config)
    why = [line.rpartition(" slower")[2].partition(": ")[2] for line in lines if " slower" in line]
    if wrong := what_is_wrong(model):
        return Found(kind, "wrong", *ways, wrong)
    return Found(kind, "trains", *ways, "; ".join(dict.fromkeys(why)))


def page_of(results: Sequence[Found], measured: Sequence[Speed]) -> str:
    """Makes docs/models.md. measured: the ways beside each other."""
    by_verdict = {
        verdict: [found for found in results if found.verdict == verdict]
        for verdict in ("trains", "refused", "not made")
    }
    trains = by_verdict["trains"]
    fast = [found for found in trains if (found.scored, found.sampled) == ("streams", "a static cache")]
    slower = [found for found in trains if found not in fast]
    made = len(trains) + len(by_verdict["refused"])
    refused, absent = by_verdict["refused"], by_verdict["not made"]
    intro = _wrapped(
        f"Of {len(results)} kinds of causal language models that transformers {transformers.__version__} "
        f"lists, {made} were made here, tiny and with random weights, and {len(trains)} of these train. "
        "`make proof PARTS=models` compares a step of each with the model's own forward pass: the log-probs "
        f"of sampler and scorer, and the gradient, are the same to {EXACTNESS:.0e} in fp32, however many "
        "rows go through at once. A run tries its own model when it loads it, whatever its kind, takes the "
        "first way that is right, and says in one line which."
    )
    return f"""# Models

{intro}

## The fast way ({len(fast)})

Scored and learned over streams of tokens, in which a group's prompt stands once; sampled over a static cache,
whose rows come and go.

{_wrapped(", ".join(found.kind for found in fast) + ".")}

## Slower ways ({len(slower)})

Each row goes through behind a prompt of its own, and rows begin together.

| scored in | sampled in | why | kinds |
|---|---|---|---|
{_rows(_together(slower))}

How fast each way is beside the first, on one model that can do all: rook-tiny over RookWorld's texts,
32 rows of up to {NEW_TOKENS} tokens, in fp32 ({processor()}); medians of rounds in turns, and their range.

| | way | speed | range |
|---|---|---|---|
{_rows(_of_speed(speed) for speed in measured)}

## Refused ({len(refused)})

Most of these look at what follows, as they are no causal models by themselves.

| why | kinds |
|---|---|
{_rows(row[2:] for row in _together(refused))}

## Not made here ({len(absent)})

A tiny model of these takes a package, or sizes that the script does not know; a run tries them as any other.

{_wrapped(", ".join(found.kind for found in absent) + ".")}
"""


def _together(results: Sequence[Found]) -> list[list[str]]:
    """Rows of the ways, the reason in few words, and the kinds that share them; the most kinds come first."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for found in results:
        kinds.setdefault((found.scored, found.sampled, _shorter(found.words)), []).append(found.kind)
    rows = [[*ways, ", ".join(names)] for ways, names in kinds.items()]
    return sorted(rows, key=lambda row: (-row[3].count(","), row))


def _shorter(reason: str) -> str:
    """A reason without the figures and names in which kinds differ."""
    parts = re.sub(r"come out [\d.e+-]+ nats wrong", "come out wrong", reason).split("; ")
    return "; ".join("it takes a cache's layers for tensors" if "StaticLayer" in it else it for it in parts)


def _of_speed(speed: Speed) -> list[str]:
    return [speed.what, speed.way, f"{speed.speed:.2f}", f"{speed.slowest:.2f} to {speed.fastest:.2f}"]


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
