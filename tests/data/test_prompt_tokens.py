"""What stands in front of a prompt is put there once, by whoever counts tokens."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo.data import Room
from grpo.data.intake import TooLong
from grpo.data.tokens import tokenize
from grpo.types import Prompt


@pytest.fixture
def beginning(tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a token in front of every text, as Llama's does."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token
    )
    made.add_special_tokens({"bos_token": "<begin>"})
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", made.bos_token_id)]
    )
    yield made
    tokenizer.backend_tokenizer.post_processor = None


def asks(text: str) -> Prompt:
    return Prompt("row:1", text, {})


def test_a_tokenizer_that_adds_nothing_adds_nothing(tokenizer):
    texts = ["P: 8/8/8/8/8/8/8/8 w - - 0 1", "A: 8"]
    assert (
        tokenize([asks(text) for text in texts], tokenizer)
        == tokenizer(texts, add_special_tokens=False)["input_ids"]
    )


def test_what_a_tokenizer_puts_in_front_is_there_once(beginning):
    plain = beginning("P: 8", add_special_tokens=False)["input_ids"]
    begin = beginning.bos_token_id
    assert tokenize([asks("P: 8"), asks("<begin>P: 8")], beginning) == [[begin, *plain], [begin, *plain]]


def test_room_is_counted_with_it(beginning):
    prompt = asks("P: 8/8/8/8/8/8/8/8 w - - 0 1")
    tokens = len(tokenize([prompt], beginning)[0])
    Room(beginning, tokens + 5, 5).check(prompt)
    with pytest.raises(TooLong):
        Room(beginning, tokens + 4, 5).check(prompt)
