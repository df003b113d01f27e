"""Which side of the held-out split a prompt is on."""

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_lines import QUIET, START, boards, game_lines, write, write_records

from grpo.data import Prompt, is_heldout, load_prompts
from grpo.data.split import position


def test_the_split_is_a_property_of_the_position_and_not_of_the_counters() -> None:
    fens = [board.fen() for board in boards(400)]
    assert {is_heldout(fen) for fen in fens} == {True, False}
    for fen in fens:
        assert is_heldout(fen) == is_heldout(" ".join(fen.split()[:4]) + " 49 99")
    assert 0.3 < sum(is_heldout(fen, 0.4) for fen in fens) / 400 < 0.5
    # printf '<first four fields>' | sha256sum begins with 05bd4852: 0x05bd4852 / 2**32 = 0.02242
    assert is_heldout(START, 0.02243) and not is_heldout(START, 0.02241)


def test_an_en_passant_square_nobody_can_use_does_not_move_a_position_to_the_other_side() -> None:
    after_e4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq"
    written, left_out = (Prompt("", "", {"fen": f"{after_e4} {square} 0 1"}) for square in ("e3", "-"))
    assert position(written) == position(left_out) == f"{after_e4} -"
    usable = "rnbqkbnr/ppp1pppp/8/8/3pP3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 3"
    assert position(Prompt("", "", {"fen": usable})).endswith(" e3")


@settings(QUIET, max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.05, 0.6))
def test_no_position_is_on_both_sides_whichever_task(tmp_path: Path, seed: int, share: float) -> None:
    spec = write(tmp_path / "lines.txt", game_lines(20, 20, seed % 50))
    source = load_prompts(spec, seed=seed, policy_share=0.5, heldout_share=share)
    drawn = source.draw(100)  # more than an epoch of each task
    assert not {p.columns["fen"] for p in drawn} & {p.columns["fen"] for p in source.heldout}
    assert {p.id for p in drawn} | {p.id for p in source.heldout} == {f"lines.txt:{n}" for n in range(1, 41)}


def test_the_heldout_side_is_the_same_for_every_seed_and_limited_by_task(tmp_path: Path) -> None:
    spec = write(tmp_path / "lines.txt", game_lines(100, 60))
    sources = [load_prompts(spec, seed=seed, heldout_share=0.3, heldout_count=7) for seed in (1, 2)]
    assert sources[0].heldout == sources[1].heldout
    assert Counter(p.task for p in sources[0].heldout) == {"policy": 7, "environment": 7}
    everything = load_prompts(spec, seed=1, heldout_share=0.3).heldout
    fens = {p.columns["fen"] for p in everything}
    assert not fens & {p.columns["fen"] for p in sources[0].draw(200)}  # dropped, not trained on
    numbers = [int(p.id.split(":")[1]) for p in everything]
    assert numbers == sorted(numbers)


def test_prompts_without_a_position_are_split_by_all_of_their_text(tmp_path: Path) -> None:
    records = [{"prompt": f"Write a short poem about {n}"} for n in range(300)]
    source = load_prompts(write_records(tmp_path / "mine.jsonl", records), seed=0, heldout_share=0.2)
    assert 30 < len(source.heldout) < 90  # the first four words alone would give 0 or 300
    assert not {p.text for p in source.heldout} & {p.text for p in source.draw(300)}
