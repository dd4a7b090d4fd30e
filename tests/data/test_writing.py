"""Atomic writing: a file is replaced as a whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepmrf.data.writing import check_folder, replacing, write_bytes, write_text


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "new folder" / "file"
    write_text(path, "old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")

    def interrupted():
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_longest_name_can_be_written(tmp_path):
    path = tmp_path / ("x" * 255)
    write_bytes(path, b"content", sync=True)
    assert path.read_bytes() == b"content"


@pytest.mark.skipif(os.name != "posix", reason="needs links, pipes and file modes")
def test_links_stay_links_and_pipes_are_written_to(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through the pipe")
    reader.join(10)
    assert received == ["through the pipe"]
    assert pipe.is_fifo()


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_others_may_read_the_file(tmp_path):
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "file", "content")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_a_file_is_no_place_for_a_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "new", file / "new" / "newer"):
        with pytest.raises(ValueError, match=r"file is a file: give a folder for the run\."):
            check_folder(folder, "the run")
    check_folder(tmp_path, "the run")
    check_folder(tmp_path / "new" / "newer", "the run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing was made


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that not even root can write into")
def test_a_folder_that_cannot_be_written_into_is_named():
    with pytest.raises(OSError, match=r"/proc cannot be written into \(.+\): give another folder for the run\."):
        check_folder(Path("/proc/new/newer"), "the run")


@pytest.mark.skipif(os.name != "posix", reason="needs devices")
def test_devices_and_standard_output_are_written_to(tmp_path):
    write_text(Path("/dev/null"), "nothing")
    assert Path("/dev/null").is_char_device()
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    write_text(link, "nothing")
    assert Path("/dev/null").is_char_device()
    assert link.is_symlink()
    code = (
        "from pathlib import Path; from deepmrf.data.writing import write_text\nwrite_text(Path('/dev/stdout'), 'out')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"out"


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_what_a_killed_process_left_is_used_again(tmp_path):
    path = tmp_path / "file"
    code = (
        "import os, sys; from pathlib import Path; from deepmrf.data.writing import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half of it'); file.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == -9
    assert len(os.listdir(tmp_path)) == 1
    write_text(path, "all")
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_text() == "all"


def test_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"2")
        assert path.read_bytes() == b"2"
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_nobody_leads_the_temporary_file_elsewhere(tmp_path):
    path, other = tmp_path / "folder" / "file", tmp_path / "other"
    with replacing(path):
        [temporary] = path.parent.iterdir()
    other.write_text("precious")
    temporary.symlink_to(other)
    write_text(path, "new")
    assert (path.read_text(), other.read_text()) == ("new", "precious")


def test_a_full_disk_is_noticed_before_the_work_and_named_after_it(tmp_path, full_disk):
    says = r"cannot be written into \(File too large\): give another folder for the run\."
    with full_disk(), pytest.raises(OSError, match=says):
        check_folder(tmp_path, "the run")
    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*file'"):
        write_text(tmp_path / "file", "content")
    assert not os.listdir(tmp_path)
