"""One step of every kind of causal language model that transformers lists: `python scripts/models_page.py`.

Each is made tiny, with random weights, in a process of its own whose memory is limited. It passes if the
log-probs of sampler and scorer, and the gradient, are those of its own forward pass, however many rows go
through at once, or if it is refused in words. docs/models.md is the table of what was found; 1 is returned if
a kind neither passes nor is refused.
"""

import inspect
import json
import os
import resource
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import transformers
import tyro
from loguru import logger
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo.config.groups import SamplingSettings
from grpo.errors import UserError
from grpo.model.load import context_length
from grpo.model.ways import decoding_of, reading_of
from grpo.prompt import Prompt
from grpo.rollout.decoder import check_decoder
from grpo.rollout.sample import Rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.logprobs import score, token_logprobs
from grpo.scoring.model_checks import check_scorer
from grpo.scoring.packing import streams
from grpo.types import Batch

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MEMORY_BYTES, SECONDS = 6 * 2**30, 600
MAX_PARAMETERS = 50_000_000
"""Of what is made tiny: one that is larger has a size that is not known here."""
EXACTNESS = 1e-5
TOKENS, PROMPTS = 8, ([5, 9, 4, 11, 3, 8, 2], [7, 6, 10, 12])
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "n_embd": 32,
    "n_layer": 4, "n_head": 4, "n_layers": 4, "n_heads": 4, "d_model": 32, "ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_layers": 4, "decoder_attention_heads": 4,
    "sliding_window": 6, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "rotary_dim": 4, "hidden_dropout": 0.0,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_d_ssm": 64, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
    "state_size": 8, "n_groups": 1, "attention_hidden_size": 32, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8, "query_pre_attn_scalar": 8,
    "num_blocks": 4, "use_mamba_kernels": False,
}  # fmt: skip
"""Of any configuration that has a setting of this name."""
MORE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8}, "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "logits_scaling": 2.0},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]}, "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {
        "num_layers": 4, "attention_types": [[["global", "local"], 2]], "num_heads": 4, "window_size": 6,
    },
    "gemma2": {"final_logit_softcapping": 5.0}, "granite": {"logits_scaling": 2.0},
    "modernbert-decoder": {"local_attention": 6}, "minicpm3": {"scale_emb": 1},
    "dots1": {"n_shared_experts": 1},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Of single kinds."""


class Found(NamedTuple):
    """What came of one kind."""

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
        page.write_text(page_of(results), encoding="utf-8")
    for found in results:
        if kinds or found.verdict == "wrong":
            print(*found, sep=" | ")
    counts = {verdict: sum(found.verdict == verdict for found in results)
              for verdict in ("trains", "refused", "not made", "wrong")}  # fmt: skip
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


def tiny(kind: str) -> PreTrainedModel:
    """Makes a model of this kind with random weights, in fp32, with attention as a run has it."""
    config = shrunk(CONFIG_MAPPING[kind], MORE.get(kind, {}))
    for name in vars(config):
        if name.endswith(("_pdrop", "dropout")):
            setattr(config, name, 0.0)
    of_kind = AutoModelForCausalLM._model_mapping[type(config)]
    attention = {"attn_implementation": "sdpa" if of_kind._supports_sdpa else "eager"}
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, **attention)
    if (count := sum(parameter.numel() for parameter in empty.parameters())) > MAX_PARAMETERS:
        raise ValueError(f"it has {count:,} parameters at the least sizes that are known here")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention).eval()


def shrunk(config: type[PretrainedConfig], more: Mapping[str, Any]) -> PretrainedConfig:
    """Makes a configuration with small sizes, of its parts, too."""
    usual = config()
    parts: dict[str, type[PretrainedConfig]] = getattr(usual, "sub_configs", {})
    known = inspect.signature(config).parameters
    sizes = {name: value for name, value in SIZES.items() if name in known or name in vars(usual)}
    if "kv_lora_rank" in sizes:  # such attention has as many heads of keys as of queries
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    of_parts = {
        name: {
            key: value for key, value in vars(shrunk(type(getattr(usual, name)), {})).items() if key in SIZES
        }
        for name in parts
        if isinstance(getattr(usual, name, None), PretrainedConfig)
    }
    return config(**sizes | of_parts | dict(more))


class _NoTexts:
    """As much of a tokenizer as sampling needs."""

    def batch_decode(self, rows: Sequence[object], **options: bool) -> list[str]:
        return [""] * len(rows)


def what_is_wrong(model: PreTrainedModel) -> str | None:
    """Compares a step of two groups of two rows, on three plans, with the model's own forward pass."""
    settings, uniforms = SamplingSettings(max_new_tokens=TOKENS), step_uniforms(4, TOKENS, seed=0, step=0)
    prompts = [Prompt("", "", {})] * 2
    batches = list[Batch]()
    for rows in (4, 2, 1):
        sampling = Rollout(model, _NoTexts(), PROMPTS, uniforms, settings, rows=rows, ends=range(0, 64, 16))  # type: ignore[arg-type]
        sampling.finish()
        batches.append(sampling.batch(prompts))
    batch = batches[0]
    exact = list[Tensor]()
    for row, ids in enumerate(batch.by_row(batch.ids)):
        text = torch.tensor([PROMPTS[row // 2] + ids.tolist()])
        logits = model(input_ids=text, use_cache=False).logits[0, -len(ids) - 1 : -1]
        exact.append(logits.log_softmax(-1).gather(1, ids.unsqueeze(1))[:, 0])
    weights = torch.randn(len(batch.ids), generator=torch.Generator().manual_seed(0))
    (torch.cat(exact) * weights).sum().backward()
    expected, logp = _gradient(model), torch.cat(exact).detach()
    for other in batches:
        if not torch.equal(other.ids, batch.ids):
            return "tokens depend on how many rows are sampled at once"
        if (apart := (other.sampler_logp - logp).abs().max().item()) > EXACTNESS:
            return f"log-probs of the sampler are {apart:.1e} nats off"
    for rows in (4, 1):
        scored = score(model, batch, rows=rows, temperature=1.0, dtype=torch.float32)
        if (apart := (scored - logp).abs().max().item()) > EXACTNESS:
            return f"log-probs of the scorer are {apart:.1e} nats off"
        for stream in streams(batch, rows):
            own = weights[stream.tokens]
            token_logprobs(
                model, stream, temperature=1.0, dtype=torch.float32, slope=lambda _, part, own=own: own[part]
            )
        if (apart := _difference(_gradient(model), expected)) > EXACTNESS:
            return f"the gradient is {apart:.1e} of its norm off, {rows} rows at once"
    return None


def _gradient(model: PreTrainedModel) -> list[Tensor]:
    """Returns what parameters have, or zeros, and takes it from them."""
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return gradient


def _difference(gradient: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    apart = sum((one - other).square().sum() for one, other in zip(gradient, expected, strict=True))
    return float((apart / sum(each.square().sum() for each in expected)) ** 0.5)


def page_of(results: Sequence[Found]) -> str:
    """Makes docs/models.md."""
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

| kind | scored in | sampled in | why |
|---|---|---|---|
{_rows((found.kind, found.scored, found.sampled, found.words) for found in slower)}

## Refused ({len(refused)})

Most of these look at what follows, as they are no causal models by themselves.

| kind | why |
|---|---|
{_rows((found.kind, found.words) for found in refused)}

## Not made here ({len(absent)})

A tiny model of these takes a package, or sizes that the script does not know; a run tries them as any other.

{_wrapped(", ".join(found.kind for found in absent) + ".")}
"""


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
