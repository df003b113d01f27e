"""Files that are there whole or as they were."""

import pytest
from benchmarks.disk_calls import Calls, calls_watched, disk_is_full

from grpo.files import replacing, write_whole


def test_whatever_fails_what_was_there_stays_and_nothing_is_left_over(tmp_path):
    file, calls = tmp_path / "a.json", Calls()
    file.write_text("before")
    with calls_watched(tmp_path, calls):
        write_whole(file, "before")
    assert calls.made >= 3
    for at in range(1, calls.made + 1):
        with pytest.raises(OSError, match="No space"), calls_watched(tmp_path, Calls(at, disk_is_full)):
            write_whole(file, "after")
        assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_what_is_interrupted_is_not_taken_for_a_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a.bin", "wb") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_text_is_utf_8_wherever_it_is_written(tmp_path):
    write_whole(tmp_path / "a.txt", "±♔\n")
    assert (tmp_path / "a.txt").read_bytes() == "±♔\n".encode()
