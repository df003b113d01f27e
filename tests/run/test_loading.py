"""Prompts as a run loads them: those that its model has room for."""

import copy
from dataclasses import replace

import datasets
import pandas
import pytest
import torch
from conftest import CONTEXT
from prompt_lines import ids, write_records
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from grpo.data import Prompt, load_prompts
from grpo.data.intake import TooLong
from grpo.data.split import heldout_fraction
from grpo.model.load import load_policy
from grpo.run.given import Given
from grpo.run.interrupt import StopRequest
from grpo.run.loading import LEAST_HELDOUT, load_source, prompt_room
from grpo.run.setup import open_run
from grpo.trainer import Trainer

NEW = 10  # tokens of a completion in `config`
LONG = "a" * (CONTEXT - NEW + 1)  # a token each


def one_too_long(folder, *, rows=100):
    """A file of the user's own prompts, the seventh of one token more than there is room for."""
    records = [{"prompt": f"{n}" if n != 7 else LONG} for n in range(1, rows + 1)]
    return write_records(folder / "mine.jsonl", records)


def asks(text: str) -> Prompt:
    return Prompt("row:1", text, {})


def test_a_prompt_that_just_fits_is_let_in(model_folders):
    room = prompt_room(str(model_folders["gpt2"]), NEW)
    room.check(asks(LONG[1:]))
    with pytest.raises(TooLong, match=r"183 tokens, .* context of 192 leaves 182 beside --max-new-tokens 10"):
        room.check(asks(LONG))


def test_a_text_of_few_bytes_is_not_tokenized():
    def tokenizer(texts, **_):
        asked.extend(text for text in texts if text != "a")  # by which it is seen what is put behind one
        return {"input_ids": [[0] * 10 for _ in texts]}

    asked = []
    room = prompt_room("rook-tiny", 500)  # 12 tokens are left
    object.__setattr__(room, "tokenizer", tokenizer)
    for text in ("a" * 10, "é" * 5, "a" * 11, "é" * 6, "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}"):
        room.check(asks(text))
    assert asked[:2] == ["a" * 11, "é" * 6]  # of eleven bytes: a token and a space may come in front
    assert len(asked) == 3  # the last is of three, but many tokenizers make eighteen letters of it


def test_a_prompt_too_long_for_the_model_is_skipped_and_named_once(config, tmp_path, logged):
    config = replace(config, prompts=one_too_long(tmp_path), heldout_share=0)
    drawn = load_source(config).draw(99)
    assert sorted(ids(drawn)) == sorted(f"mine.jsonl:{n}" for n in range(1, 101) if n != 7)
    (warning,) = [message for message in logged if message.startswith("WARNING")]
    assert "1 of 100 rows (1.0%)" in warning and "mine.jsonl:7: a prompt of 183 tokens" in warning


def test_too_many_of_them_are_an_error_that_says_what_to_lower(config, tmp_path):
    config = replace(config, prompts=one_too_long(tmp_path, rows=50))
    with pytest.raises(
        ValueError,
        match=r"1 of 50 rows.*mine.jsonl:7: .*leaves 182 beside --max-new-tokens 10; at most 1.0% may be: "
        r"lower --max-new-tokens, choose another --model, or allow more with --max-bad-share 0.02",
    ):
        load_source(config)
    sampling = replace(config.sampling, max_new_tokens=9)
    assert len(set(ids(load_source(replace(config, sampling=sampling, heldout_share=0)).draw(50)))) == 50


def test_lines_of_both_kinds_are_shown(config, tmp_path):
    path = one_too_long(tmp_path)
    with open(path, "a") as file:
        file.write("{\n")
    with pytest.raises(
        ValueError,
        match=r"2 of 101 rows.*mine.jsonl:101: .* and mine.jsonl:7: .*: repair them, lower --max-new",
    ):
        load_source(replace(config, prompts=path))


def test_a_held_out_prompt_fits_as_well(config, tmp_path):
    path = one_too_long(tmp_path)
    share = heldout_fraction(Prompt("", LONG, {})) + 0.01
    assert "mine.jsonl:7" in ids(load_prompts(path, seed=0, heldout_share=share).heldout)
    fitting = load_source(replace(config, prompts=path, heldout_share=share)).heldout
    assert fitting and "mine.jsonl:7" not in ids(fitting)


def test_where_all_fit_nothing_changes(config, data_file):
    one, other = (
        load_source(config),
        load_prompts(str(data_file), seed=0, policy_share=0.5, heldout_share=0.2),
    )
    assert one.state() == other.state() and one.heldout == other.heldout
    assert one.draw(150) == other.draw(150)


def test_a_prompt_that_is_no_unicode_is_skipped(config, tmp_path):
    """JSON can write half a character, which no tokenizer takes."""
    path = one_too_long(tmp_path)
    with open(path, "a") as file:
        file.write('{"prompt": "\\ud83d"}\n')
    source = load_source(replace(config, prompts=path, heldout_share=0, max_bad_share=0.02))
    assert "mine.jsonl:101" not in ids(source.draw(99))


def test_as_many_prompts_are_held_out_as_are_evaluated(config, tmp_path):
    path = write_records(tmp_path / "mine.jsonl", [{"prompt": f"{n}"} for n in range(1500)])
    config = replace(config, prompts=path, heldout_share=0.9)

    def count(**changes):
        return len(load_source(replace(config, **changes)).heldout)

    assert count(eval_prompts=1200) == 1200 and count(eval_prompts=100) == 100
    assert count(eval_prompts=1) == count(eval_prompts=100, eval_interval=0) == LEAST_HELDOUT


@pytest.mark.usefixtures("made_up_plans")
def test_a_run_goes_past_a_prompt_that_is_too_long(config, tmp_path):
    (tmp_path / "mine.py").write_text("def length(completions, **_):\n    return [*map(len, completions)]\n")
    config = replace(
        config, prompts=one_too_long(tmp_path, rows=8), max_bad_share=0.2, heldout_share=0, eval_interval=0,
        reward=(f"{tmp_path}/mine.py:length",),
    )  # fmt: skip
    with open_run(config) as run:  # 4 steps of 2 prompts: one more than there are
        trainer = Trainer(run, Console(quiet=True))
        trainer.train(StopRequest())
    assert trainer.finished == 4


# ------------------------------------------------------------- tokenizers and models that differ


def grown(load, tokens: list[str], **special: str):
    """A model, and its tokenizer with more tokens than it has rows."""
    policy = load("gpt2")
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.add_tokens(tokens)
    tokenizer.add_special_tokens(special)
    return policy.model, tokenizer


def test_a_tokenizer_of_another_model_is_refused_before_the_first_step(config, load):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=600, n_positions=CONTEXT, n_embd=8, n_layer=1, n_head=1))
    given = Given(model, load("gpt2").tokenizer)
    with (
        pytest.raises(ValueError, match=r"has 902 tokens, but the model has rows for 600"),
        open_run(config, given),
    ):
        pass


@pytest.mark.usefixtures("made_up_plans")
def test_tokens_that_were_added_matter_where_a_prompt_has_them(config, load, logged):
    """On CUDA one ends the process; elsewhere with an IndexError when its prompt is drawn."""
    model, tokenizer = grown(load, ["<think>"], pad_token="<pad>")
    rows = [{"prompt": f"Say {n}."} for n in range(9)] + [{"prompt": "Say <think>."}]
    config = replace(config, eval_interval=0, heldout_share=0, steps=1, checkpoint_interval=0)
    given = Given(model, tokenizer, rows, [lambda completions, **columns: [1.0] * len(completions)])
    with (
        pytest.raises(
            ValueError, match="row 10: the token '<think>', which the tokenizer knows and the model"
        ),
        open_run(config, given),
    ):
        pass
    with open_run(replace(config, max_bad_share=0.1), given) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())


@pytest.mark.usefixtures("made_up_plans")
def test_an_end_that_the_model_cannot_write_is_told(config, load, logged):
    model, tokenizer = grown(load, [], eos_token="<end>")
    with open_run(config, Given(model, tokenizer)):
        pass
    (warning,) = [line for line in logged if "cannot write" in line]
    assert warning == "WARNING the model has 902 tokens and cannot write <end>, which is to end a text"


@pytest.mark.usefixtures("made_up_plans")
@pytest.mark.parametrize("rows", [960, 1000])
def test_a_model_may_have_rows_that_its_tokenizer_has_no_token_for(config, load, rows):
    """As those padded to a multiple of 64 have, and those whose embeddings were made larger: such an id may
    be sampled, decodes to nothing, and what is saved loads as it was.
    """
    policy = load("llama")
    policy.model.resize_token_embeddings(rows)
    with torch.no_grad():  # often
        policy.model.get_output_embeddings().weight[902:] *= 20
    config = replace(config, steps=1, eval_interval=0)
    with open_run(config, Given(policy.model, policy.tokenizer)) as run:
        trainer = Trainer(run, Console(quiet=True))
        (step,) = trainer
    assert (step.rollout.completion_ids >= 902).any() and len(step.completions) == config.num_rows
    saved = load_policy(str(run.folder), torch.device("cpu"), "fp32").model
    assert torch.equal(saved.get_output_embeddings().weight, policy.model.get_output_embeddings().weight)


ROWS = [{"prompt": "Say hello.", "limit": 3}, {"prompt": "Name a colour.", "limit": 5}]


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "DatasetDict"),
        ({"prompt": ["Say hello."], "limit": [3]}, "dict"),
        (["Say hello.", "Name a colour."], "list of str"),
        (pandas.DataFrame(ROWS), "DataFrame of str"),
        (datasets.Dataset.from_list(ROWS).with_format("pandas"), "Dataset of DataFrame"),
        (7, "int"),
    ],
    ids=["splits", "columns", "texts", "frame", "frames", "number"],
)
def test_what_are_no_rows_is_told_with_what_is_wanted(config, prompts, kind):
    with pytest.raises(ValueError, match=rf"^prompts is a {kind}: give rows, each a dictionary of columns"):
        Trainer(config, prompts=prompts)


@pytest.mark.parametrize("prompts", [ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS)])
def test_rows_are_taken_however_they_come(prompts):
    source = load_prompts(prompts, seed=0, heldout_share=0)
    assert sorted(prompt.columns["limit"] for prompt in source.draw(2)) == [3, 5]


@pytest.mark.usefixtures("made_up_plans")
def test_a_trainer_that_takes_no_step_can_be_closed(config):
    config = replace(config, steps=1)
    trainer = Trainer(config)
    with pytest.raises(ValueError, match=r"is training in .*it is this process: .* closed by close\(\)"):
        Trainer(config)
    trainer.close()
    with Trainer(config) as again:
        again.train(StopRequest())
    trainer.close()  # again does no harm
