"""Files that are there whole or as they were; a disk that fails is faults/test_disk.py's."""

import pytest

from grpo.files import replacing, write_whole


def test_what_is_interrupted_is_not_taken_for_a_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a.bin", "wb") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_text_is_utf_8_wherever_it_is_written(tmp_path):
    write_whole(tmp_path / "a.txt", "±♔\n")
    assert (tmp_path / "a.txt").read_bytes() == "±♔\n".encode()
