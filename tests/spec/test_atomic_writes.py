"""A file is replaced as a whole, whether or not the writer waits for the disk."""

import ctypes
import threading

import pytest

from pipefit.spec.files import write_atomically


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_made_and_replaced_and_leaves_nothing_behind(durable, tmp_path):
    path = tmp_path / "folder" / "file.json"
    for content in ("first", "the second, which is longer", "third"):
        write_atomically(path, content, durable=durable)
        assert path.read_text() == content
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_a_link_is_replaced_and_its_target_stays(durable, tmp_path):
    (tmp_path / "target").write_text("old")
    path = tmp_path / "link"
    path.symlink_to("target")
    write_atomically(path, "new", durable=durable)
    assert path.read_text() == "new" and not path.is_symlink()
    assert (tmp_path / "target").read_text() == "old"


def test_every_replacement_is_another_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "first", durable=False)
    before = path.stat()
    with path.open() as reader:
        write_atomically(path, "second", durable=False)
        assert path.stat().st_ino != before.st_ino and reader.read() == "first"


def test_where_names_cannot_be_exchanged_the_file_is_replaced(tmp_path, monkeypatch):
    class Without:
        def __init__(self, name: object) -> None:
            pass

    monkeypatch.setattr(ctypes, "CDLL", Without)
    for content in ("first", "second"):
        write_atomically(tmp_path / "file", content, durable=False)
        assert (tmp_path / "file").read_text() == content
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_reader_always_finds_a_whole_file(durable, tmp_path):
    path = tmp_path / "file"
    contents = ["a" * 9000, "b" * 7000]
    write_atomically(path, contents[0], durable=durable)
    seen = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(60):
            write_atomically(path, contents[turn % 2], durable=durable)
    finally:
        done.set()
        reader.join()
    assert seen and set(seen) <= set(contents)
