"""The tokenizer of rook-tiny: characters, the 64 squares inside moves, and pieces that know their square.

In a FEN, where a piece stands is a sum over the digits before it: hard to learn for a small model.
The normalizer marks each piece of a placement with its square, so that "the rook on a6" is one
token; the decoder drops the marks again, and the texts stay RookWorld's. The marks are private-use
characters that exist only inside the tokenizer.
"""

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
PIECES = "pnbrqkPNBRQK"

_EMPTY = "_"
_MARKS = [chr(0xE000 + square) for square in range(64)]  # a8, b8, … h1: the order of a FEN
_ANY_MARK = f"[{_MARKS[0]}-{_MARKS[-1]}]"
_CELL = f"[{PIECES}{_EMPTY}]"
_IN_PLACEMENT = rf"(?=[1-8{PIECES}/{_EMPTY}]* [wb] )"
_SQUARE = r"[a-h][1-8]"
_ORIGIN = rf"(?:(?<=[ +])|^){_SQUARE}(?={_SQUARE}[nbrq]?(?:[ +]|$))"
_TARGET = rf"(?:(?<=[ +]{_SQUARE})|(?<=^{_SQUARE})){_SQUARE}(?=[nbrq]?(?:[ +]|$))"


def _mark_pieces() -> normalizers.Normalizer:
    """Spell runs of empty squares out, mark pieces from a8 to h1, and fold the runs again.

    A rule finds its square by what follows it, which the rules before it have left alone.
    """
    spell_out = [normalizers.Replace(Regex(f"{n}{_IN_PLACEMENT}"), _EMPTY * n) for n in range(1, 9)]
    mark = [
        normalizers.Replace(
            Regex(
                rf"(?<=[{PIECES}])(?={_CELL}{{{7 - square % 8}}}(?:/{_CELL}{{8}}){{{7 - square // 8}}} [wb] )"
            ),
            _MARKS[square],
        )
        for square in range(64)
    ]
    fold = [normalizers.Replace(_EMPTY * n, str(n)) for n in range(8, 0, -1)]
    return normalizers.Sequence([*spell_out, *mark, *fold])


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer whose `tokenizer.json` carries all of the above. pad = eos, as in GPT-2."""
    characters = string.ascii_letters + string.digits + " +-./:"
    squares = [file + rank for file in "abcdefgh" for rank in "12345678"]
    placed = [piece + mark for piece in PIECES for mark in _MARKS]
    vocabulary = {token: i for i, token in enumerate([END, UNKNOWN, *characters, *squares, *placed])}

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = _mark_pieces()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(f"[{PIECES}]{_ANY_MARK}|{_ORIGIN}|{_TARGET}|."), "isolated"
    )
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(_ANY_MARK), "")])
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        bos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
