"""Rows of one's own columns, and conversations: what is asked is what TRL and chat templates make of it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo.config import Config, SettingsError
from grpo.config.groups import PromptSettings
from grpo.data import Room, load_prompts
from grpo.data.asking import template_text
from grpo.data.beforehand import check_beforehand
from grpo.data.tokens import tokenize
from grpo.prompt import Prompt

CHATML = (  # as Qwen 2's: a system message of its own where there is none, tools in it
    "{%- if messages[0].role != 'system' and not tools %}<|start|>system\nBe kind.<|end|>\n{% endif -%}"
    "{%- if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif -%}"
    "{%- for message in messages -%}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant\n{% if no_think %}<|quiet|>{% endif %}{%- endif -%}"
)
HEADERS = (  # as Llama 3's: the token that begins a text, and a header before each message
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}<|header|>{{ message.role }}<|headed|>\n\n"
    "{{ message.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|headed|>\n\n{% endif %}"
)
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
PLAIN = PromptSettings()


def words(*, first: bool = False, last: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of letters that adds a token in front or at the end, as its kin do."""
    special = ["<first>", "<last>", "<|start|>", "<|end|>", "<|header|>", "<|headed|>", "<|quiet|>"]
    vocabulary = {token: i for i, token in enumerate([*special, "?", *map(chr, range(10, 127))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(special)
    if first or last:
        made.post_processor = TemplateProcessing(
            single=" ".join(["<first>"] * first + ["$A"] + ["<last>"] * last),
            special_tokens=[("<first>", 0), ("<last>", 1)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<first>", eos_token="<last>", chat_template=template
    )


def load(
    rows: list[dict[str, Any]], settings: PromptSettings = PLAIN, **kind: Any
) -> tuple[list[Prompt], Any]:
    """The prompts of rows, in their order, and the tokenizer."""
    tokenizer = words(**kind)
    source = load_prompts(rows, seed=0, heldout_share=0, settings=settings, room=Room(tokenizer, 4096, 16))
    return sorted(source.draw(len(rows)), key=lambda prompt: prompt.id), tokenizer


def refused(match: str, rows: list[dict[str, Any]], settings: PromptSettings = PLAIN, **kind: Any) -> None:
    with pytest.raises(ValueError, match=match):
        load(rows, settings, **kind)


@pytest.mark.parametrize("kind", [{}, {"first": True}, {"last": True}, {"first": True, "last": True}])
def test_text_is_tokenized_as_trl_does(kind):
    """But for a token behind it: a prompt is to go on, and would be learned from as if it had ended."""
    prompts, tokenizer = load([{"prompt": "a b"}, {"prompt": "c<last>"}], **kind)
    trls = tokenizer(text=["a b", "c<last>"])["input_ids"]  # TRL: _tokenize_prompts
    assert tokenize(prompts, tokenizer) == [ids[:-1] if kind.get("last") else ids for ids in trls]
    assert tokenize(prompts, tokenizer)[1][-1] == tokenizer.eos_token_id  # the person's own


NAME_IT = "{{ instruction }}: {{ input }}"


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        (NAME_IT, "Name a colour: "),
        ("{{ instruction ~ ': ' ~ input }}", "Name a colour: "),
        ("{% if input is none %}{{ instruction }}.{% endif %}", "Name a colour."),
        ("{% if not input %}{{ instruction }}!{% endif %}", "Name a colour!"),
        ("{{ instruction }}{{ facts.b }}{{ facts.c[0] }}", "Name a colour"),
    ],
)
@pytest.mark.parametrize("file", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_an_empty_field_is_empty(tmp_path: Path, template, asked, file):
    (tmp_path / "ask.jinja").write_bytes(b"\xef\xbb\xbf" + template.encode())  # with Notepad's mark
    row = {"instruction": "Name a colour", "input": None, "facts": {"b": None, "c": [None]}}
    path = tmp_path / file
    if file == "rows.csv":
        if "facts" in template:
            return
        path.write_text("instruction,input,answer\nName a colour,,red\n")
    elif file == "rows.jsonl":
        path.write_text(json.dumps(row))
    else:
        parquet.write_table(Table.from_pylist([row]), path)
    settings = PromptSettings(prompt_template=tmp_path / "ask.jinja")
    source = load_prompts(str(path), seed=0, heldout_share=0, settings=settings)
    (prompt,) = source.draw(1)
    assert prompt.text == asked
    assert file == "rows.csv" or prompt.columns["input"] is None  # as rewards get it


def test_nothing_in_a_conversation_is_not_written_either():
    """Tables give every message, tool and option all names that one of them has."""
    tools = [{"type": "function", "function": {"name": "add", "strict": None}}]
    calls = [{"role": "user", "content": "2 + 2?", "name": None}]
    row = {"prompt": calls, "tools": tools, "chat_template_kwargs": {"today": None}}
    template = CHATML + "{% if today is defined %}{{ today }}{% endif %}"
    (prompt,), _ = load([row], template=template)
    assert "add" in prompt.text and not re.search("[Nn]one|null", prompt.text)


def test_a_mark_at_the_beginning_of_a_chat_template_is_not_saved(tmp_path: Path):
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xef\xbb\xbf" + CHATML.encode())
    (prompt,), tokenizer = load([{"prompt": TALK}], PromptSettings(chat_template=file))
    assert prompt.text == tokenizer.apply_chat_template(
        TALK, chat_template=CHATML, add_generation_prompt=True, tokenize=False
    )
    assert template_text(file, "chat_template") == CHATML


@pytest.mark.parametrize("kind", [{"template": CHATML}, {"template": HEADERS, "first": True}])
@pytest.mark.parametrize("talk", [TALK, TALK[1:], [*TALK, {"role": "assistant", "content": "4"}, TALK[1]]])
def test_a_conversation_is_what_its_template_makes_of_it(kind, talk):
    (prompt,), tokenizer = load([{"prompt": talk, "answer": 4}], **kind)
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    assert tokenize([prompt], tokenizer) == [ids]
    assert (prompt.messages, prompt.asked, prompt.columns["answer"]) == (talk, talk, 4)
    assert prompt.said("4") == [{"role": "assistant", "content": "4"}]


def test_tools_and_options_of_a_row_reach_the_template():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows: list[dict[str, Any]] = [
        {"prompt": TALK[1:], "tools": tools, "chat_template_kwargs": {"no_think": True}},
        {"prompt": TALK[1:], "tools": json.dumps(tools), "chat_template_kwargs": None},
        {"prompt": TALK[1:], "tools": []},
    ]
    prompts, tokenizer = load(rows, template=CHATML)
    for prompt, given, options in zip(
        prompts, (tools, tools, None), ({"no_think": True}, {}, {}), strict=True
    ):
        assert prompt.text == tokenizer.apply_chat_template(
            TALK[1:], tools=given, add_generation_prompt=True, tokenize=False, **options
        )
    assert prompts[0].text.endswith("<|quiet|>") and '"add"' in prompts[1].text


def test_plain_columns_become_a_conversation(tmp_path: Path):
    template = tmp_path / "ask.jinja"
    template.write_text("Solve {{ question }}. Write \\boxed{answer}.")
    rows = [{"question": "2 + 2", "prompt": "not this"}]
    asked = [{"role": "user", "content": "Solve 2 + 2. Write \\boxed{answer}."}]
    by_template = PromptSettings(prompt_template=template)
    (prompt,), _ = load(
        rows, PromptSettings(prompt_template=template, system_prompt="Be brief."), template=CHATML
    )
    assert prompt.messages == [TALK[0], *asked]
    (prompt,), _ = load(rows, by_template, template=CHATML)
    assert prompt.messages == asked and prompt.columns["question"] == "2 + 2"
    (prompt,), _ = load(rows, by_template)  # of a tokenizer without a chat template it is text
    assert prompt.asked == "Solve 2 + 2. Write \\boxed{answer}."
    (prompt,), _ = load(rows, PromptSettings(prompt_template=template, chat="off"), template=CHATML)
    assert prompt.messages is None
    (prompt,), _ = load(rows, PromptSettings(prompt_column="question", chat="on"), template=CHATML)
    assert prompt.messages == [{"role": "user", "content": "2 + 2"}]
    (prompt,), _ = load([{"prompt": TALK}], PromptSettings(system_prompt="Another."), template=CHATML)
    assert prompt.messages == TALK  # which has a system message
    (prompt,), _ = load([{"prompt": "2 + 2?"}], template=CHATML)
    assert prompt.asked == "2 + 2?"  # as TRL has it: text is text


def test_another_chat_template_overrides_the_tokenizers(tmp_path: Path):
    (tmp_path / "chat.jinja").write_text(HEADERS)
    settings = PromptSettings(chat_template=tmp_path / "chat.jinja")
    (prompt,), _ = load([{"prompt": "2 + 2?"}], settings, template=CHATML)
    assert prompt.text.startswith("<first><|header|>user<|headed|>")


def test_what_cannot_be_asked_is_said_with_the_remedy(tmp_path: Path):
    broken, empty = tmp_path / "broken.jinja", tmp_path / "empty.jinja"
    broken.write_text("{{ question")
    empty.write_text(" \n")
    refused("message 2 of `prompt` has no role", [{"prompt": [TALK[0], {"content": "?"}]}], template=CHATML)
    refused("message 1 of `prompt` has empty as its content", [{"prompt": [{"role": "user", "content": []}]}])
    refused("message 1 of `prompt` is str", [{"prompt": ["hello"]}])
    refused("`prompt` is empty, and neither text nor a list", [{"prompt": []}])
    refused("prompts are conversations, but .* has no chat template: give --chat", [{"prompt": TALK}])
    refused(
        "no chat template: give --chat-template FILE", [{"prompt": "a"}], PromptSettings(system_prompt="b")
    )
    tool = [{"role": "tool", "content": "4"}]
    refused("the chat template does not take it: no tools here", [{"prompt": tool}], template=HEADERS)
    refused(
        "no `question`; there are prompt, n",
        [{"prompt": "a", "n": 1}],
        PromptSettings(prompt_column="question"),
    )
    for file, reason in (
        (broken, "no Jinja template: line 1"),
        (empty, "is empty"),
        (tmp_path / "no", "No such file"),
    ):
        refused(f"prompt_template is .*{reason}", [{"prompt": "a"}], PromptSettings(prompt_template=file))
    refused(
        "chat template is no Jinja template",
        [{"prompt": TALK}],
        PromptSettings(chat_template=broken),
        template=CHATML,
    )
    template = tmp_path / "ask.jinja"
    template.write_text("{{ question }}")
    refused("prompt_template: 'question' is undefined; there are prompt", [{"prompt": "a"}],
            PromptSettings(prompt_template=template))  # fmt: skip
    chess = [{"text": "P: 8/8/8/4k3/8/8/4P3/4K3 w - - 0 1"}]
    refused("holds chess positions: leave", chess, PromptSettings(chat="on"), template=CHATML)


def test_a_missing_chat_template_is_known_before_anything_is_loaded(tmp_path: Path, model_folders):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"prompt": TALK}))
    config = Config(model=str(model_folders["gpt2"]), prompts=str(file), reward=("policy",))
    for each in (config, replace(config, model="rook-tiny"),
                 replace(config, prompts="bundled", asking=PromptSettings(chat="on"))):  # fmt: skip
        with pytest.raises(SettingsError, match="no chat template: give --chat-template"):
            check_beforehand(each)
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    check_beforehand(replace(config, asking=PromptSettings(chat_template=template)))
    check_beforehand(replace(config, model="owner/name"))  # of which nothing is known


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="system_prompt is empty"):
        PromptSettings(system_prompt=" ")
    with pytest.raises(ValueError, match="chat is off, but system_prompt is given"):
        PromptSettings(system_prompt="a", chat="off")


@pytest.mark.parametrize(("name", "mark"), [("sums.csv", ","), ("sums.tsv", "\t")])
def test_tables_are_read_by_the_names_in_their_first_line(tmp_path: Path, name: str, mark: str):
    lines = [
        ("question", "answer", "code", "share"),
        ('"say ""a"",', "4", "007", "0.5"),
        ("b", "", "010", "1e-2"),
    ]
    lines[1] = (f'"say ""a""{mark}\nand b"', *lines[1][1:])
    (tmp_path / name).write_text("\n".join(mark.join(line) for line in lines) + "\n")
    settings = PromptSettings(prompt_column="question")
    source = load_prompts(str(tmp_path / name), seed=0, heldout_share=0, settings=settings)
    first, second = sorted(source.draw(2), key=lambda prompt: prompt.id)
    assert (first.id, first.text) == (f"{name}:1", f'say "a"{mark}\nand b')
    assert [first.columns[key] for key in ("answer", "code", "share")] == [4, "007", 0.5]
    assert [second.columns[key] for key in ("answer", "code", "share")] == [None, "010", 0.01]


def test_a_table_that_is_none_is_an_error_with_its_place(tmp_path: Path):
    file = tmp_path / "sums.csv"
    file.write_text("prompt,answer\na,1,2\n")
    with pytest.raises(ValueError, match=r"sums.csv:1: 3 fields, and 2 names in the first line"):
        load_prompts(str(file), seed=0)
    file.write_text("prompt,prompt\na,b\n")
    with pytest.raises(ValueError, match="names a column twice in its first line"):
        load_prompts(str(file), seed=0)


def test_a_quote_that_is_not_closed_is_an_error_that_names_its_line(tmp_path: Path):
    """And not all rows behind it in one field."""
    file = tmp_path / "sums.csv"
    lines = ["question,answer", '"two', 'lines",0', *(f"q{n},{n}" for n in range(300))]
    lines[250] = '"q247,247'
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"sums.csv, in the row that begins in line 251: unexpected end"):
        load_prompts(str(file), seed=0, settings=PromptSettings(prompt_column="question"))


@pytest.mark.parametrize("file", ["sums.csv", "sums.jsonl"])
def test_a_number_beyond_all_numbers_is_not_infinity(tmp_path: Path, file):
    rows = [("a", "1.5"), ("b", "-1e400"), ("c", "2")]
    text = "\n".join(["prompt,answer", *map(",".join, rows)])
    if file == "sums.jsonl":
        text = "\n".join(f'{{"prompt": "{name}", "answer": {number}}}' for name, number in rows)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=rf"{file}:2: -1e400 is beyond the largest number"):
        load_prompts(str(tmp_path / file), seed=0)
    source = load_prompts(str(tmp_path / file), seed=0, heldout_share=0, max_bad_share=0.5)
    assert sorted(prompt.columns["answer"] for prompt in source.draw(2)) == [1.5, 2]
