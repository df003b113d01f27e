"""The bundled positions are true, and the bundled tokens say where a piece stands."""

import chess
from prompt_lines import EnvironmentSample, parse_line

from grpo.data.load import POSITIONS
from rewards.environment import referee

HELDOUT = POSITIONS.joinpath("heldout.txt").read_text().splitlines()


def test_bundled_lines_are_true():
    for sample in map(parse_line, HELDOUT):
        board = chess.Board(sample.fen)
        assert board.is_valid() and 2 < len(board.piece_map()) <= 6
        if isinstance(sample, EnvironmentSample):
            answer = (sample.next_fen, sample.reward, sample.terminated, sample.truncated)
            assert answer == referee(sample.fen, sample.action) and sample.history[-1] == sample.action
        else:
            assert sample.evals[sample.moves.index(sample.best)] == max(sample.evals)
            assert len(sample.moves) == min(5, board.legal_moves.count())
            assert all(chess.Move.from_uci(move) in board.legal_moves for move in sample.moves)


def test_tokens_decode_to_the_text_and_split_where_the_prompt_ends(tokenizer):
    for line in HELDOUT[800:1200]:
        ids = tokenizer(line)["input_ids"]
        assert tokenizer.decode(ids) == line and tokenizer.unk_token_id not in ids
        cut = line.index(" M:") if line[0] == "P" else [i for i, c in enumerate(line) if c == "+"][2] + 1
        assert tokenizer(line[:cut])["input_ids"] + tokenizer(line[cut:])["input_ids"] == ids


def test_every_piece_token_names_its_square(tokenizer):
    for line in HELDOUT[:50]:
        board = chess.Board(parse_line(line).fen)
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(f"P: {board.fen()}")["input_ids"])
        placed = {(each[0], chess.square_mirror(ord(each[1]) - 0xE000)) for each in tokens if len(each) == 2}
        assert placed == {(piece.symbol(), square) for square, piece in board.piece_map().items()}
