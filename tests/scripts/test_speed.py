"""The speed benchmark: everybody does the same work, and the machine's least time is counted right."""

import json

import pytest
import torch
from benchmarks.speed import Case, Outcome, race, race_table, race_verdicts
from benchmarks.speed_growth import draw_growth, growth_table, line_of
from benchmarks.speed_limits import PhaseWork, Rates, limit_table, phase_work
from benchmarks.speed_work import prepare, without_end
from benchmarks.speed_worker import StepTime
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from grpo.model.names import BUNDLED_FOLDER
from grpo.run.tracking import MEMORY_FILE, read_lines


def step(seconds, peak=100, **split):
    return StepTime(seconds, 60.0, 144.0, {f"timing/{name}_s": value for name, value in split.items()}, peak)


CASE = Case("tiny", "rook-tiny", None, 8, 1, (2.0, 5.0), batch_size=8, group_size=4, max_new_tokens=6)


def test_work_is_counted_as_by_hand():
    """One layer of width 2, 3 words; 1 prompt of 2 tokens, 2 completions of 4."""
    config = GPT2Config(n_embd=2, n_layer=1, vocab_size=3, n_positions=10)
    counted = phase_work(config, prompts=1, group_size=2, prompt_tokens=2, new_tokens=4)
    blocks, head, tokens = 12 * 2 * 2, 3 * 2, 2 + 2 * 4
    attended = 2 * 2 / 2 + 2 * (4 * 2 + 4 * 4 / 2)
    forward = 2 * blocks * tokens + 4 * 2 * attended + 2 * head * 8
    assert counted["score"].flops == forward and counted["learn"].flops == 3 * forward
    weights, cache = 2 * (blocks + head), 2 * 2 * 2 * (4 * 2 + 2 * 4 * 4 / 2)
    assert counted["sample"] == PhaseWork(forward, 4 * weights + cache)
    assert counted["update"].bytes == (blocks + head + 20) * 38
    assert PhaseWork(10, 4).least_seconds(Rates(5, 1)) == 4


def test_a_ratio_is_of_the_steps_of_one_round():
    outcome = Outcome(CASE, {"ours": [step(1), step(2)], "trl": [step(4, 50), step(4, 400)]})
    ratio, low, high = outcome.ratio("trl")
    assert ratio == pytest.approx(8**0.5) and low < ratio < high
    assert outcome.memory_ratio("trl") == 0.25
    assert list(race_verdicts([outcome]).values()) == [True, True]
    assert race_table([outcome]).row_count == 1


def test_phases_are_shown_beside_the_least_time_and_the_rest_as_a_share():
    steps = [step(2.0, sample=1.0, other=0.1)] * 3
    table = limit_table("x", steps, GPT2Config(), Rates(1e12, 1e11), prompts=8, group_size=8)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["sample", "score", "learn", "update", "other"]
    assert cells[5][4] == "5.0% of a step"


def test_growth_is_a_line_or_a_cliff(tmp_path):
    def line(*seconds):
        steps = [[step(s, sample=s / 2, score=0.1, learn=0.2)] * 3 for s in seconds]
        return line_of("batch size", (8, 16, 32), steps)

    straight, steep, flat = line(1.0, 1.8, 3.4), line(1.0, 1.8, 5.4), line(1.0, 1.0, 1.0)
    assert straight.fit == pytest.approx((0.2, 0.1)) and straight.worst == pytest.approx(0, abs=1e-9)
    assert straight.cliffs == flat.cliffs == [] and steep.cliffs == [32] and steep.worst > 0.1
    assert [list(column.cells)[2] for column in growth_table(straight).columns] == [
        "32", "3.40", "3.40", "1.70", "0.10", "0.20"
    ]  # fmt: skip
    draw_growth([straight, steep], tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_without_end_never_ends_and_is_else_a_model():
    model = without_end(AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER, dtype=torch.float32)).eval()
    end = model.config.eos_token_id
    with torch.no_grad():
        probabilities = model(torch.randint(1, 900, (4, 20))).logits.softmax(-1)
    assert probabilities[..., end].max() == 0
    assert probabilities.max() < 1 and torch.isfinite(probabilities).all()


def test_prompts_have_one_length_and_both_tasks(tmp_path):
    _, ours, theirs = prepare("rook-tiny without end", 60, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    lines = theirs.read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert {len(ids) for ids in tokenizer(prompts)["input_ids"]} == {60}
    assert [prompt[:2] for prompt in prompts[:4]] == ["P:", "A:", "P:", "A:"]
    assert len(ours.read_text().splitlines()) == len(lines) == 128


def test_both_trainers_take_their_turns(tmp_path):
    outcome = race(CASE, tmp_path, contenders=("ours", "trl"))
    for name, steps in outcome.steps.items():
        assert len(steps) == 1 and steps[0].seconds > 0 and steps[0].peak_bytes > 2**27, name
        assert 0 < steps[0].new_tokens <= 6
    assert {"timing/sample_s", "timing/learn_s"} <= set(outcome.steps["ours"][0].split)
    (file,) = tmp_path.rglob(MEMORY_FILE)  # the trainer resets the system's peak at each phase
    assert outcome.steps["ours"][0].peak_bytes >= max(each["peak_bytes"] for each in read_lines(file))
