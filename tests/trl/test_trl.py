"""Our trainer beside stock TRL's: the same steps in float64, in parts of any size; and what TRL's users do.

`make proof PARTS=trl` does all 384 cases.
"""

import json
import math
import re
from typing import Any

import pytest
import torch
import trl
import trl_cases
from datasets import Dataset
from families import another
from loguru import logger
from peft import LoraConfig
from several_processes import in_processes, values
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl_cases import GROUP, GROUPS, LOSSES, STEPS, Case, Ours, Stock, difference, make, rows_at_once, run
from trl_own_tests import tokenizer

from grpo.trl import GRPOTrainer
from grpo.trl.parts import Part, completion_lengths, fields_by_row, merged, parts

pytestmark = pytest.mark.usefixtures("own_accelerator")
SIZES = GROUP, 3 * GROUP, GROUP // 2
BONUS = (("entropy_coef", 0.05),)
ADAPTIVE = (("use_adaptive_entropy", True), ("entropy_target", 1.2), ("entropy_coef_delta", 0.02))
CASES = [
    Case("grpo", "token", 0.0, 2, 2, BONUS),
    Case("bnpo", "sequence", 0.04, 1, 2),
    Case("dr_grpo", "token", 0.04, 2, 1, ADAPTIVE),
    Case("dapo", "token", 0.0, 1, 2, (("off_policy_mask_threshold", 0.01), ("steps_per_generation", 4))),
    Case("sapo", "sequence", 0.0, 2, 1),
    Case("luspo", "sequence", 0.04, 2, 2),
    Case("cispo", "token", 0.04, 1, 2),
    Case("vespo", "token", 0.0, 2, 1),
    Case("bnpo", "token", 0.0, 2, 1, (*BONUS, ("mask_truncated_completions", True))),
    Case("grpo", "token", 0.04, more=(("use_bias_correction_kl", True), ("delta", 1.5))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.loss}-{CASES.index(case)}")
def test_a_step_in_parts_is_stock_trls_step(case):
    ours = run(Ours, case, prepare=rows_at_once(SIZES[CASES.index(case) % 3]))
    assert max(difference(run(Stock, case), ours)) < 1e-10
    assert {entry["kl"] > 0 for entry in ours["logged"][1:] if case.beta} <= {True}


@pytest.mark.parametrize("name", ["gemma2", "gptj", "qwen3_5_text", "lfm2"])
def test_a_step_of_any_kind_of_model_is_stock_trls_step(name, monkeypatch):
    """To the rounding of fp32, in which these compute norms, or the states of their linear attention."""
    dtype = torch.float64
    monkeypatch.setattr(trl_cases, "model", lambda: another(name, vocabulary=8, context=32, dtype=dtype))
    case = Case(accumulation=2, beta=0.04)
    parameters, logged = difference(run(Stock, case), run(Ours, case, prepare=rows_at_once(2 * GROUP)))
    assert parameters < 2e-6
    assert logged < 1e-3


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_without_an_advantage_may_be_left_out(loss):
    """Parameters and the loss are stock TRL's; in the last step no group has anything to teach."""
    seen: list[int] = []

    def coarse(trainer: Any) -> None:
        """Many groups have equal rewards."""
        trainer.reward_funcs = [
            lambda completions, completion_ids, **_: [
                float(len(ids) > 5 and trainer.state.global_step < 3) for ids in completion_ids
            ]
        ]

    def in_parts(trainer: Any) -> None:
        coarse(trainer)
        rows_at_once(3)(trainer)
        trainer.model.register_forward_pre_hook(
            lambda model, words, named: seen.append(len(named["input_ids"])), with_kwargs=True
        )

    case = Case(loss, accumulation=2)
    stock = run(Stock, case, prepare=coarse)
    ours = run(Ours, case, prepare=in_parts, skip_zero_variance=True)
    for skipped in (stock, ours):  # of all rows, and of those that are learned from
        for line in skipped["logged"]:
            for name in [
                name for name in line if name.startswith(("entropy", "clip_ratio", "cispo", "vespo"))
            ]:
                del line[name]
    assert max(difference(stock, ours)) < 1e-10
    assert sum(seen) < 0.8 * STEPS * GROUP * GROUPS
    assert seen[-2:] == [1, 1]  # a step of two batches is a step


@pytest.mark.parametrize("settings", [(("beta", 0.04),), BONUS])
def test_rows_that_are_learned_from_are_not_left_out(settings):
    with pytest.raises(ValueError, match=r"skip_zero_variance .*(beta is 0.04|bonus on entropy)"):
        make(GRPOTrainer, Case(more=settings), skip_zero_variance=True)


def test_every_loss_is_among_them():
    assert {case.loss for case in CASES} == set(LOSSES)


class Faults:
    """Memory runs out at one of a trainer's passes, forward and backward counted together."""

    def __init__(self, at: int | None) -> None:
        self.at, self.passes = at, 0

    def __call__(self, trainer) -> None:
        rows_at_once(2 * GROUP)(trainer)

        def passing(module, given, hidden):
            self.one()
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: self.one())

        trainer.model.transformer.ln_f.register_forward_hook(passing)

    def one(self) -> None:
        self.passes += 1
        if self.passes == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_runs_out_at_any_pass_changes_nothing():
    """With an entropy whose weight adapts, which is a state of the trainer that a pass may have moved."""
    case = Case("bnpo", "token", 0.04, 2, more=(("max_steps", 1), *ADAPTIVE))
    stock, counted = run(Stock, case), Faults(None)
    assert max(difference(stock, run(Ours, case, prepare=counted))) < 1e-10
    assert counted.passes >= 6
    for at in range(1, counted.passes + 1):
        faults = Faults(at)
        assert max(difference(stock, run(Ours, case, prepare=faults))) < 1e-10, f"at pass {at}"
        assert faults.passes > counted.passes


def test_an_evaluation_in_parts_is_stock_trls():
    stock, ours = (make(kind, Case("grpo", "token", 0.04)) for kind in (Stock, Ours))
    rows_at_once(GROUP)(ours)
    stock, ours = (trainer.evaluate(trainer.train_dataset) for trainer in (stock, ours))
    for name in ("eval_loss", "eval_kl", "eval_entropy", "eval_reward", "eval_clip_ratio/low_min"):
        assert ours[name] == pytest.approx(stock[name], abs=1e-9), name


SHARED = Case("grpo", "sequence", 0.04, 1, 2)


def little_memory(trainer: Any) -> None:
    """Passes of more than a group run out of memory in the second process."""
    if trainer.accelerator.process_index == 0:
        return

    def forward(module: Any, given: Any, named: Any) -> None:
        if len(named["input_ids"]) > GROUP:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
    trainer.fit.plan = lambda phase, batch, *, like="": batch.rows  # until it runs out


def take_steps(rank: int) -> tuple[dict[str, Any], str]:
    """Returns the outcome of the case, and what was logged."""
    said: list[str] = []
    logger.add(said.append)
    done = run(Ours, SHARED, prepare=little_memory, processes=2)
    torch.distributed.destroy_process_group()
    return done, "".join(said)


def test_two_unlike_processes_take_the_steps_of_one():
    """One has half the memory of the other, and nobody waits."""
    (mine, _), (theirs, said) = values(in_processes(2, take_steps))
    assert "learn: out of memory with" in said
    assert max(difference(run(Stock, SHARED), mine)) < 1e-10
    assert all(torch.equal(value, theirs["parameters"][name]) for name, value in mine["parameters"].items())


# ---------------------------------------------------------------------------------------------- parts

LENGTHS = [3, 7, 0, 5, 7, 1]
P, C = 4, 8


def batch() -> dict:
    mask = (torch.arange(C) < torch.tensor(LENGTHS)[:, None]).int()
    ids = torch.arange(6)[:, None] * 10 + torch.arange(C)
    return {
        "prompt_ids": torch.arange(6)[:, None].expand(6, P),
        "prompt_mask": torch.ones(6, P).int(),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.arange(6.0),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": ids.double(),
        "importance_sampling_ratio": torch.arange(6.0)[:, None],
        "token_type_ids": torch.zeros(6, P + C),
        "ref_per_token_logps": None,
    }


def test_rows_are_there_once_the_longest_first():
    made = list(parts(batch(), 4))
    assert [part["advantages"].tolist() for part in made] == [[1, 4, 3, 0], [5, 2]]
    assert [part.is_last for part in made] == [False, True]
    assert [(part.rows, part.tokens) for part in made] == [(4, 22), (2, 1)]
    assert made[0].weight("grpo") == 4 / 6 and made[0].weight("bnpo") == 22 / 23
    assert {part.weight("dapo") for part in made} == {1.0}
    assert sum(part.weight(loss) for part in made for loss in ("grpo", "bnpo")) == pytest.approx(2)


def test_columns_that_only_pad_are_left_out():
    long, short = parts(batch(), 4)
    assert long["completion_ids"].shape == (4, 7) and short["completion_ids"].shape == (2, 2)
    assert short["completion_ids"].tolist() == [[50, 51], [20, 21]]  # at least: one is a number a row to TRL
    assert short["old_per_token_logps"].shape == (2, 2) and short["token_type_ids"].shape == (2, P + 2)
    assert short["importance_sampling_ratio"].shape == (2, 1) and short["prompt_ids"].shape == (2, P)
    assert short["num_items_in_batch"].item() == 23 and short["ref_per_token_logps"] is None
    (_, padded) = parts(batch(), 4, multiple=4)
    assert padded["completion_ids"].shape == (2, 4)
    assert completion_lengths(batch()).tolist() == LENGTHS
    inputs = batch() | {"tool_mask": torch.ones(6, C).int()}
    inputs["tool_mask"][1, 2:5] = 0  # what a tool said counts for its length, but not as a token
    (whole,) = parts(inputs, 6)
    assert whole.tokens == sum(LENGTHS) - 3 and whole["completion_ids"].shape[1] == 7


@pytest.mark.parametrize(
    ("pixels", "patches", "expected"),
    [
        ([0, 0, 20, 21, 21, 30, 50], [2, 1, 2, 1, 1], [None, [30, 0, 0], [50, 20, 21, 21]]),
        ([0, 20, 21, 30, 50], None, [None, [30, 0], [50, 20, 21]]),
        (range(6), None, [[1, 4], [3, 0], [5, 2]]),
    ],
    ids=["grid", "flat", "a row each"],
)
def test_images_go_with_their_rows(pixels, patches, expected):
    given = {"pixel_values": torch.tensor(pixels)[:, None], "num_images": [1, 0, 2, 1, 0, 1]}
    if patches:
        given["image_grid_thw"] = torch.tensor([[1, count, 1] for count in patches])
    made = list(parts(batch() | given, 2))
    assert [part.get("num_images", [0, 0]) for part in made] == [[0, 0], [1, 1], [1, 2]]
    found = [part["pixel_values"].flatten().tolist() if "pixel_values" in part else None for part in made]
    assert found == expected


def test_metrics_do_not_depend_on_the_parts():
    def part(rows: int, tokens: int, **metrics: float) -> Part:
        ids = {"completion_ids": torch.zeros(rows, 3)}
        made = Part(ids, rows=rows, tokens=tokens, of_rows=4, of_tokens=10)
        for name, value in metrics.items():
            made.metrics[name.replace("__", "/")].append(value)
        return made

    both = [
        part(3, 4, kl=1.0, policy_loss=2.0, clip__low_min=0.5, clip__high_max=math.nan, vespo__phi=1.0),
        part(1, 6, kl=2.0, policy_loss=4.0, clip__low_min=0.2, clip__high_max=math.nan, vespo__phi=5.0),
    ]
    together = merged(both, loss_type="grpo", by_sequence=False)
    assert together["kl"] == (16.0, 10.0) and together["policy_loss"] == (2.5, 1.0)
    assert together["clip/low_min"] == (0.2, 0.0) and math.isnan(together["clip/high_max"][0])
    assert together["vespo/phi"] == (8.0, 4.0)
    assert merged(both, loss_type="dapo", by_sequence=True)["policy_loss"] == (6.0, 1.0)
    assert merged(both, loss_type="bnpo", by_sequence=True)["kl"] == (16.0, 10.0)


# ------------------------------------------------------------------------------------------- sampling

PROMPTS = [[1 + i // GROUP] * (1 + i // GROUP) for i in range(GROUPS * GROUP)]


@pytest.fixture
def trainer():
    return make(GRPOTrainer, Case(), native_sampling=False)


def sampled(trainer, seed: int = 0, **options):
    torch.manual_seed(seed)
    ids, logprobs = trainer._generate_single_turn(PROMPTS, None, options, GROUP)
    assert logprobs is None
    return ids


def spied(monkeypatch, fails=lambda calls: False):
    """Let TRL's own generation note the prompts it is given, and run out of memory where it `fails`."""
    calls = []
    generate = trl.GRPOTrainer._generate_single_turn

    def spy(self, prompt_ids, *rest, **named):
        calls.append(prompt_ids)
        made = generate(self, prompt_ids, *rest, **named)
        if fails(calls):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", spy)
    return calls


def test_parts_are_whole_groups_in_their_order_and_grow(trainer, monkeypatch):
    calls = spied(monkeypatch)
    ids = sampled(trainer)
    assert len(ids) == len(PROMPTS) and all(1 <= len(each) <= trainer.max_completion_length for each in ids)
    assert [row for call in calls for row in call] == PROMPTS
    assert [len(call) for call in calls] == [GROUP, 2 * GROUP, 3 * GROUP]  # one, twice that, what is left
    calls.clear()
    sampled(trainer)
    assert [len(call) for call in calls] == [GROUPS * GROUP]


def test_a_part_that_is_done_again_with_as_many_rows_is_the_same(trainer, monkeypatch):
    rows_at_once(2 * GROUP)(trainer)
    expected = sampled(trainer)
    calls = spied(monkeypatch, lambda calls: len(calls) == 2)
    assert sampled(trainer) == expected and len(calls) == 4
    assert sampled(trainer, seed=1) != expected


def test_one_that_does_not_fit_is_done_with_fewer(trainer, monkeypatch):
    rows_at_once(4 * GROUP)(trainer)
    calls = spied(monkeypatch, lambda calls: len(calls[-1]) > GROUP)
    assert len(sampled(trainer)) == len(PROMPTS)
    assert [len(call) for call in calls][:4] == [16, 16, 8, 4]


@pytest.mark.parametrize("setting", ["use_vllm", "use_transformers_continuous_batching"])
def test_who_minds_memory_itself_is_asked_once(trainer, monkeypatch, setting):
    asked = []
    monkeypatch.setattr(trainer, setting, True)
    monkeypatch.setattr(
        trl.GRPOTrainer,
        "_generate_single_turn",
        lambda self, prompt_ids, *rest: asked.append(len(prompt_ids)) or ([[1]] * len(prompt_ids), [[0.0]]),
    )
    ids, logprobs = trainer._generate_single_turn(PROMPTS, None, {}, GROUP)
    assert asked == [len(PROMPTS)] and logprobs == [[0.0]] and len(ids) == len(PROMPTS)


def test_what_a_processor_gives_goes_with_its_rows():
    """Three rows, of two, no and one image: by a grid of patches, an image at a time, a row at a time."""
    images, grid = (["a", "b"], None, ["c"]), torch.tensor([[1, 2, 2], [1, 1, 2], [1, 2, 1]])
    pixels, kinds = torch.arange(8.0).view(8, 1), [[1], [0], [1]]
    fields = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    some = fields_by_row(fields, images, 3)
    first, rest = some(slice(0, 1)), some(slice(1, 3))
    assert first["pixel_values"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert rest["pixel_values"].flatten().tolist() == [6, 7]
    assert rest["image_grid_thw"].tolist() == [[1, 2, 1]] and rest["mm_token_type_ids"] == [[0], [1]]
    assert "num_images" not in first
    flat = fields_by_row({"pixel_values": pixels[:3]}, images, 3)
    assert flat(slice(2, 3))["pixel_values"].flatten().tolist() == [2]
    padded = fields_by_row({"pixel_values": pixels[:6].view(3, 2, 1)}, [["a", "b"], ["c"], ["d"]], 3)
    assert padded(slice(1, 2))["pixel_values"].flatten().tolist() == [2, 3]
    tiles = {"pixel_values": torch.zeros(7, 1), "spatial_shapes": torch.zeros(7, 2)}
    assert fields_by_row(tiles, images, 3) is None  # not known how they divide
    assert fields_by_row({"pixel_values": torch.zeros(7, 1)}, images, 3) is None
    assert fields_by_row({}, None, 3)(slice(0, 1)) == {}


# ---------------------------------------------------------------------------------------------- users


MESSAGES = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is {i}?"}] for i in range(8)]})


def chat_trainer(tmp_path, *, beta: float = 0.0, **given) -> GRPOTrainer:
    """Three steps of eight rows of a Qwen 3 that chats in bytes."""
    torch.manual_seed(0)
    letters = tokenizer("qwen3")
    config = Qwen3Config(
        vocab_size=len(letters),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=letters.eos_token_id,
    )
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        beta=beta,
    )
    model = Qwen3ForCausalLM(config)
    return GRPOTrainer(model, processing_class=letters, train_dataset=MESSAGES, args=args, **given)


def test_a_conversation_with_adapters_and_a_metric_of_the_reward(tmp_path, capsys):
    def brevity(completions, log_metric, trainer_state, **_):
        log_metric("letters", sum(len(each[0]["content"]) for each in completions))
        return [-float(len(each[0]["content"])) for each in completions]

    trainer = chat_trainer(tmp_path, beta=0.04, reward_funcs=brevity, peft_config=LoraConfig(r=2))
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    first, _, last = trainer.state.log_history[:3]
    assert first["letters"] > 0 and first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert [first[f"memory/{phase}_rows"] for phase in ("sample", "score", "learn")] == [4, 4, 4]
    assert last["memory/learn_rows"] == 8 and last["memory/learn_peak_gb"] > 0.1
    assert last["memory/learn_retries"] == 0
    table = capsys.readouterr().out
    assert "Memory planned after the first step" in table and "Memory, most of all steps" in table
    assert re.search(r"learn\W+8\W+0\.\d\d\d\W", table)


def train_with_tools(monkeypatch, trainer, name: str, *, by: type, **arguments) -> list[int]:
    """Let the first turn of every other row call a tool; the rest is sampled. Gives the rows of each call.

    by: the class that is asked, ours or TRL's.
    """
    asked, letters = [], trainer.processing_class
    text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"
    generate = by._generate_single_turn

    def first_turn_calls(self, prompt_ids, *rest, **named):
        asked.append(len(prompt_ids))
        ids, logprobs = generate(self, prompt_ids, *rest, **named)
        if "<tool_response>" not in letters.decode(prompt_ids[0]):
            ids[::2] = [letters(text)["input_ids"] for _ in ids[::2]]
        return ids, logprobs

    monkeypatch.setattr(by, "_generate_single_turn", first_turn_calls)
    trainer.max_completion_length = 160
    trainer.train()
    return asked


@pytest.mark.parametrize("native", [True, False])
def test_an_environment_and_its_tool(tmp_path, monkeypatch, native):
    calls = []

    class Counter:
        def reset(self, **kwargs) -> str | None:
            self.count = 0
            return " Count."

        def add(self, amount: int) -> int:
            """Add to the count.

            Args:
                amount: How much.
            """
            calls.append(amount)
            self.count += amount
            return self.count

        def get_reward(self) -> float:
            return float(self.count)

    trainer = chat_trainer(tmp_path, environment_factory=Counter, native_sampling=native)
    kind = GRPOTrainer if native else trl.GRPOTrainer
    asked = train_with_tools(monkeypatch, trainer, "add", by=kind, amount=2)
    log = trainer.state.log_history[:3]
    assert calls == [2] * 12 and all(entry["reward"] == 1.0 for entry in log)
    assert log[0]["tools/call_frequency"] == 0.5 and log[0]["tools/failure_frequency"] == 0
    # Two groups, at first one by one where TRL samples, and the four rows that go on after a tool's answer.
    assert asked[:3] == ([8, 4, 8] if native else [4, 4, 4])


def test_memory_that_runs_out_is_told_and_the_run_goes_on(trainer, logged):
    def forward(module, given, named):
        if module.training and len(named["input_ids"]) > GROUP:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
    trainer.train()
    assert [entry["memory/learn_rows"] for entry in trainer.state.log_history[:-1]] == [GROUP] * 4
    assert trainer.state.log_history[1]["memory/learn_retries"] == 2
    assert any("learn: out of memory with 8 rows" in line for line in logged)
    assert any("plan: learn 8 -> 4 rows at once: memory ran out (OutOfMem" in line for line in logged)
