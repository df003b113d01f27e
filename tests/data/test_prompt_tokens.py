"""What stands in front of a prompt is put there once, by whoever counts tokens."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo.data import Room
from grpo.data.intake import TooLong
from grpo.data.tokens import tokenize


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


def test_a_tokenizer_that_adds_nothing_adds_nothing(tokenizer):
    texts = ["P: 8/8/8/8/8/8/8/8 w - - 0 1", "A: 8"]
    assert tokenize(texts, tokenizer) == tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_what_a_tokenizer_puts_in_front_is_there_once(beginning):
    plain = beginning("P: 8", add_special_tokens=False)["input_ids"]
    begin = beginning.bos_token_id
    assert tokenize(["P: 8", "<begin>P: 8"], beginning) == [[begin, *plain], [begin, *plain]]


def test_room_is_counted_with_it(beginning):
    text = "P: 8/8/8/8/8/8/8/8 w - - 0 1"
    tokens = len(tokenize([text], beginning)[0])
    Room(beginning, tokens + 5, 5).check(text)
    with pytest.raises(TooLong):
        Room(beginning, tokens + 4, 5).check(text)
