"""Rows of one's own columns, and conversations: what is asked is what TRL and chat templates make of it."""

import json
import re
from typing import Any

import pytest
from pyarrow import Table, parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo.config.groups import PromptSettings
from grpo.data import PromptBudget, load_prompts
from grpo.data.maker import TooLong
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
MARK = b"\xef\xbb\xbf"  # with which Notepad begins a file


def words(*, first: bool = False, last: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of letters that adds a token in front or at the end, as its kin do."""
    special = ["<first>", "<last>", "<|start|>", "<|end|>", "<|header|>", "<|headed|>", "<|quiet|>"]
    vocabulary = {token: i for i, token in enumerate([*special, "?", *map(chr, range(10, 127))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(special)
    around = " ".join(["<first>"] * first + ["$A"] + ["<last>"] * last)
    made.post_processor = TemplateProcessing(around, special_tokens=[("<first>", 0), ("<last>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<first>", eos_token="<last>", chat_template=template
    )


def load(rows: list[dict], settings: PromptSettings = PLAIN, **kind: Any) -> tuple[list[Prompt], Any]:
    """The prompts of rows, in their order, and the tokenizer."""
    tokenizer = words(**kind)
    source = load_prompts(
        rows, seed=0, heldout_share=0, settings=settings, room=PromptBudget(tokenizer, 4096, 16)
    )
    return sorted(source.draw(len(rows)), key=lambda prompt: prompt.id), tokenizer


@pytest.fixture
def template(tmp_path):
    def written(text: str | bytes, name: str = "ask.jinja"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return written


@pytest.mark.parametrize("kind", [{}, {"first": True}, {"last": True}, {"first": True, "last": True}])
def test_text_is_tokenized_as_trl_does(kind):
    """But for a token behind it: a prompt is to go on, and would be learned from as if it had ended."""
    prompts, tokenizer = load([{"prompt": "a b"}, {"prompt": "c<last>"}], **kind)
    trls = tokenizer(text=["a b", "c<last>"])["input_ids"]  # TRL: _tokenize_prompts
    assert tokenize(prompts, tokenizer) == [ids[:-1] if kind.get("last") else ids for ids in trls]
    assert tokenize(prompts, tokenizer)[1][-1] == tokenizer.eos_token_id  # the person's own


def test_what_a_tokenizer_puts_in_front_is_there_once_and_counted():
    asks, tokenizer = [Prompt("row:1", text, {}) for text in ("a b", "<first>a b")], words(first=True)
    (plain,) = tokenizer(["a b"], add_special_tokens=False)["input_ids"]
    assert tokenize(asks, tokenizer) == [[tokenizer.bos_token_id, *plain]] * 2
    PromptBudget(tokenizer, len(plain) + 6, 5).check(asks[0])
    with pytest.raises(TooLong):
        PromptBudget(tokenizer, len(plain) + 5, 5).check(asks[0])


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("{{ question }}: {{ input }}", "a: "),
        ("{{ question ~ ': ' ~ input }}", "a: "),
        ("{% if input is none %}{{ question }}.{% endif %}", "a."),
        ("{% if not input %}{{ question }}!{% endif %}", "a!"),
        ("{{ question }}{{ facts.b }}{{ facts.c[0] }}", "a"),
    ],
)
def test_an_empty_field_is_empty_in_every_kind_of_file(tmp_path, template, text, asked):
    row = {"question": "a", "input": None, "facts": {"b": None, "c": [None]}}
    (tmp_path / "rows.csv").write_text("question,input,answer\na,,red\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    parquet.write_table(Table.from_pylist([row]), tmp_path / "rows.parquet")
    settings = PromptSettings(prompt_template=template(MARK + text.encode()))
    for kind in ("jsonl", "parquet", *(["csv"] if "facts" not in text else [])):
        source = load_prompts(str(tmp_path / f"rows.{kind}"), seed=0, heldout_share=0, settings=settings)
        (prompt,) = source.draw(1)
        assert prompt.text == asked and prompt.columns["input"] is None  # as rewards get it


@pytest.mark.parametrize("kind", [{"template": CHATML}, {"template": HEADERS, "first": True}])
@pytest.mark.parametrize("talk", [TALK, TALK[1:], [*TALK, {"role": "assistant", "content": "4"}, TALK[1]]])
def test_a_conversation_is_what_its_template_makes_of_it(kind, talk):
    (prompt,), tokenizer = load([{"prompt": talk, "answer": 4}], **kind)
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    assert tokenize([prompt], tokenizer) == [ids]
    assert (prompt.messages, prompt.for_rewards, prompt.columns["answer"]) == (talk, talk, 4)
    assert prompt.as_completion("4") == [{"role": "assistant", "content": "4"}]


def test_tools_and_options_of_a_row_reach_the_template():
    """Nothing in them is not written: tables give every tool and option all names that one of them has."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows: list[dict[str, Any]] = [
        {"tools": tools, "chat_template_kwargs": {"no_think": True}},
        {"tools": json.dumps(tools), "chat_template_kwargs": None},
        {"tools": []},
    ]
    prompts, tokenizer = load([{"prompt": TALK[1:], **row} for row in rows], template=CHATML)
    for prompt, given, quiet in zip(prompts, (tools, tools, None), (True, False, False), strict=True):
        assert prompt.text == tokenizer.apply_chat_template(
            TALK[1:], tools=given, add_generation_prompt=True, tokenize=False, no_think=quiet
        )
        assert prompt.text.endswith("<|quiet|>") == quiet and ('"add"' in prompt.text) == bool(given)
    row = {"prompt": [{**TALK[1], "name": None}], "chat_template_kwargs": {"today": None}}
    row["tools"] = [{"type": "function", "function": {"name": "add", "strict": None}}]
    (prompt,), _ = load([row], template=CHATML + "{% if today is defined %}{{ today }}{% endif %}")
    assert "add" in prompt.text and not re.search("[Nn]one|null", prompt.text)


def test_plain_columns_become_a_conversation(template):
    file, row = template("Solve {{ question }}."), {"question": "2 + 2", "prompt": "not this"}
    asked = [{"role": "user", "content": "Solve 2 + 2."}]

    def made(given: dict[str, Any], tokenizers: str | None = CHATML, **settings: Any) -> Prompt:
        (prompt,), _ = load([given], PromptSettings(**settings), template=tokenizers)
        return prompt

    assert made(row, prompt_template=file, system_prompt="Be brief.").messages == [TALK[0], *asked]
    prompt = made(row, prompt_template=file)
    assert prompt.messages == asked and prompt.columns["question"] == "2 + 2"
    assert (
        made(row, None, prompt_template=file).for_rewards == "Solve 2 + 2."
    )  # without a chat template it is text
    assert made(row, prompt_template=file, chat="off").messages is None
    by_column = made(row, prompt_column="question", chat="on")
    assert by_column.messages == [{"role": "user", "content": "2 + 2"}]
    assert made({"prompt": TALK}, system_prompt="Another.").messages == TALK  # which has a system message
    assert made({"prompt": "2 + 2?"}).for_rewards == "2 + 2?"  # as TRL has it: text is text
    # another chat template overrides the tokenizer's, and a mark at its beginning is no part of it
    other = made({"prompt": "2 + 2?"}, chat_template=template(MARK + HEADERS.encode()))
    assert other.text == "<first><|header|>user<|headed|>\n\n2 + 2?<|end|><|header|>assistant<|headed|>\n\n"
    assert other.messages == [{"role": "user", "content": "2 + 2?"}]


WAYS_OUT = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ x['__class__']['__base__'] }}",
    "{{ x|attr('__class__') }}",
    "{{ x['_' ~ '_class_' ~ '_'] }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('touch OUT').read() }}",
    "{{ namespace['__init__'] }}",
    "{{ lipsum.__globals__['os'].system('touch OUT') }}",
    "{{ lipsum|attr('__globals__') }}",
    "{{ dict.__subclasses__() }}",
    "{{ self.__init__.__globals__.__builtins__.open('OUT', 'w') }}",
    "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set call = '{0.__class__}'.format %}{{ call(1) }}",
    "{{ (['{0.__class__}']|map('attr', 'format')|first)(1) }}",
    "{{ x.format.__self__ }}",
    "{{ [x]|map(attribute='__class__')|map('upper')|list }}",
    "{{ rows.append(1) }}",
    "{{ table.update(prompt='another') }}",
    "{% include 'OUT' %}",
    "{{ range(10**9)|list }}",
    "{% import 'os' as os %}{{ os.system('touch OUT') }}",
]
"""A template of somebody who wants out of the sandbox: see docs/security.md."""


@pytest.mark.parametrize("setting", ["prompt_template", "chat_template"])
@pytest.mark.parametrize("text", WAYS_OUT)
def test_a_template_that_wants_out_of_its_sandbox_finds_nothing(
    tmp_path, monkeypatch, template, text, setting
):
    """The user's own, or one that comes with a model: a bad row, or, of the latter, nothing in its place."""
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "hello", "x": "letters", "rows": [1], "table": {"a": 1}}
    before, given = json.dumps(row), {"settings": PromptSettings(chat="on")}
    if setting == "prompt_template":
        given["settings"] = PromptSettings(prompt_template=template(text))
    else:
        given["template"] = "{%- set x, rows, table = 'letters', messages, messages[0] -%}[" + text
    try:
        (prompt,), _ = load([row], **given)
        assert setting == "chat_template" and prompt.text in ("[", "[['']"), prompt.text
    except ValueError as error:
        assert re.search("1 of 1 rows.*(unsafe|has no attribute|no loader|too big)", str(error))
        assert "\n" not in str(error) and "<class" not in str(error)
    assert json.dumps(row) == before and {path.name for path in tmp_path.iterdir()} <= {"ask.jinja"}


def test_what_a_row_says_is_never_a_template(template):
    """Nor the name of a file: {{ }} in a column, or in a message, is text like any other."""
    secret = template("secret", "secret.txt")
    sly = f"{{{{ 7 * 7 }}}}{{% include '{secret}' %}}{secret} file://{secret}"
    settings = PromptSettings(prompt_template=template("Say: {{ words }}"))
    (prompt,), _ = load([{"words": sly, "image": str(secret)}], settings)
    assert prompt.text == f"Say: {sly}" and prompt.columns["image"] == str(secret)
    (prompt,), _ = load([{"prompt": [{"role": "user", "content": sly}]}], template=CHATML)
    assert sly in prompt.text and "49" not in prompt.text


@pytest.mark.parametrize(("name", "mark"), [("sums.csv", ","), ("sums.tsv", "\t")])
def test_tables_are_read_by_the_names_in_their_first_line(tmp_path, name: str, mark: str):
    lines = [
        ("question", "answer", "code", "share"),
        (f'"say ""a""{mark}\nand b"', "4", "007", "0.5"),
        ("b", "", "010", "1e-2"),
        ("c", "", "", "1e400"),
    ]
    (tmp_path / name).write_text("\n".join(mark.join(line) for line in lines) + "\n")
    settings = PromptSettings(prompt_column="question")
    source = load_prompts(str(tmp_path / name), seed=0, heldout_share=0, settings=settings, max_bad_share=0.5)
    first, second = sorted(source.draw(2), key=lambda prompt: prompt.id)
    assert (first.id, first.text) == (f"{name}:1", f'say "a"{mark}\nand b')
    read = [[row.columns[key] for key in ("answer", "code", "share")] for row in (first, second)]
    assert read == [[4, "007", 0.5], [None, "010", 0.01]]
