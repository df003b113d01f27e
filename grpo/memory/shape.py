"""What a phase's memory depends on, the formulas that it follows, and the shapes they are fitted to.

Rows are independent: all is affine in them. Attention that keeps its weights is quadratic in tokens.
For R rows of P prompt and C new tokens, bytes are

    a + s·min(K, chunk) + R·(b0 + b1·P + b2·C + b3·P·C + b4·C² + b5·P²)           a pass over whole texts
    a + a1·P + a2·C + R·(b0 + b1·P + b2·C + b3·P²) + Q·(c0 + c1·P + c2·P²)        decoding

K tokens are scored in all, and the vocabulary head holds at most one chunk of them. While rows decode, Q
groups' prompts may be computed beside them, and when a group leaves, the others are copied: one group
less than there are, hence a1 and a2.
"""

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """What a phase's memory depends on: rows at once, and tokens of the longest row."""

    rows: int
    prompt_tokens: int
    new_tokens: int
    scored_tokens: int | None = None
    """New tokens of all rows that go through the vocabulary head; None: all are of full length."""
    joining_groups: int = 0
    """Groups whose prompts are computed while all rows decode, to take the places of others."""


def pass_features(shape: Shape, *, chunk_tokens: int | None = None) -> np.ndarray:
    """What the coefficients of a pass over whole texts stand before, (8,)."""
    r, p, c = (float(each) for each in shape[:3])
    scored = r * c if shape.scored_tokens is None else shape.scored_tokens
    chunk = 0.0 if chunk_tokens is None else min(scored, chunk_tokens)
    return np.array([1.0, chunk, r, r * p, r * c, r * p * c, r * c * c, r * p * p])


def decoding_features(shape: Shape) -> np.ndarray:
    """What the coefficients of decoding stand before, (10,)."""
    r, p, c = (float(each) for each in shape[:3])
    q = float(shape.joining_groups)
    return np.array([1.0, p, c, r, r * p, r * c, r * p * p, q, q * p, q * p * p])


def pass_shapes(longest: Shape, *, group_size: int, chunk_tokens: int | None = None) -> list[Shape]:
    """Eleven shapes up to `longest` from which all coefficients of a pass follow.

    Three are small, as other moments may be the peak there. The others have rows enough to fill the
    head's chunk, however short completions are: below it, what a token adds to the chunk and to the
    rest cannot be told apart.
    """
    (short_prompt, middle_prompt, long_prompt), (short_new, middle_new, long_new) = _lengths(longest)
    g = group_size * max(1, -(-(chunk_tokens or 0) // (group_size * long_new)))
    return [
        Shape(2 * group_size, short_prompt, short_new),
        Shape(2 * group_size, long_prompt, long_new),
        Shape(5 * group_size, middle_prompt, middle_new),
        Shape(8 * g, short_prompt, short_new),
        Shape(2 * g, long_prompt, short_new),
        Shape(4 * g, long_prompt, long_new),
        Shape(2 * g, middle_prompt, middle_new),
        Shape(4 * g, short_prompt, long_new),
        Shape(8 * g, middle_prompt, middle_new),
        Shape(4 * g, long_prompt, middle_new),
        Shape(3 * g, middle_prompt, long_new),
    ]


def decoding_shapes(longest: Shape, *, group_size: int) -> list[Shape]:
    """Twelve shapes up to `longest` from which all coefficients of decoding follow.

    Some have groups enough that more than one joins at once. None has one group, which nothing joins.
    """
    (short_prompt, middle_prompt, long_prompt), (short_new, middle_new, long_new) = _lengths(longest)
    g = group_size
    return [
        Shape(2 * g, short_prompt, short_new),
        Shape(2 * g, long_prompt, long_new),
        Shape(3 * g, long_prompt, short_new),
        Shape(3 * g, middle_prompt, long_new),
        Shape(4 * g, short_prompt, long_new),
        Shape(5 * g, middle_prompt, middle_new),
        Shape(16 * g, short_prompt, short_new),
        Shape(16 * g, long_prompt, middle_new),
        Shape(16 * g, long_prompt, long_new),
        Shape(24 * g, long_prompt, short_new),
        Shape(32 * g, short_prompt, long_new),
        Shape(32 * g, middle_prompt, middle_new),
    ]


def _lengths(longest: Shape) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Short, middle and long: prompts, and new tokens."""
    long_prompt, long_new = longest.prompt_tokens, longest.new_tokens
    short_prompt, short_new = max(1, long_prompt // 6), max(2, long_new // 8)
    middle = (short_prompt + long_prompt) // 2, (short_new + long_new) // 2
    return (short_prompt, middle[0], long_prompt), (short_new, middle[1], long_new)
