"""Files at URLs: what is one, names of remote files in a local tree, and files that appear complete or not at all."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations, register_implementation

from deepmrf.data import remote
from deepmrf.data.remote import URL, Mirror, Names, path_or_url


class InPlace(LocalFileSystem):
    """Files that grow in their place, as those over sftp do."""

    protocol = "inplace"

    def put_file(self, lpath, rpath, **options):
        Path(self._strip_protocol(rpath)).write_bytes(Path(lpath).read_bytes()[:3])
        if self.breaks:
            raise ConnectionError("The connection broke.")
        super().put_file(lpath, rpath, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("photos", Path("photos")),
        ("a:b/c", Path("a:b/c")),
        (Path("photos"), Path("photos")),
        ("file:///a/b", Path("/a/b")),
        ("local:///a/b", Path("/a/b")),
        ("s3://bucket/photos/", URL("s3://bucket/photos")),
        ("memory://x", URL("memory://x")),
    ],
)
def test_what_is_a_url(text, expected):
    result = path_or_url(text)
    assert (result, type(result)) == (expected, type(expected))


def test_the_parts_of_a_url():
    url = URL("s3://bucket/photos/x.tar.gz")
    assert (url.name, url.suffix, url.parent) == ("x.tar.gz", ".gz", "s3://bucket/photos")
    assert url.parent.name == "photos"


def test_a_mirror_has_the_names_and_no_content(memory):
    memory.pipe({"/in/a.png": b"1", "/in/deep/b.png": b"22", "/in/deep/er/c.png": b"3", "/other/d.png": b"4"})
    with Mirror() as mirror:
        folder = mirror.add(URL("memory://in"), depth=2)
        names = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        assert names == {"a.png": 0, "deep/b.png": 0}
        assert mirror.names.url(folder / "deep/b.png") == "memory://in/deep/b.png"
        assert mirror.names.url(Path("/somewhere")) is None
        assert mirror.names.in_words(f"Bad: {folder}/a.png.") == "Bad: memory://in/a.png."
        single = mirror.add(URL("memory://other/d.png"))
        assert single.is_file()
        missing = mirror.add(URL("memory://gone"))
        assert not missing.exists()
    assert not folder.exists()


def test_a_pattern_in_a_mirror(memory):
    memory.pipe({"/in/a.png": b"1", "/in/b.jpg": b"2", "/in/sub/c.png": b"3"})
    with Mirror() as mirror:
        pattern = mirror.add(URL("memory://in/*.png"))
        assert pattern.name == "*.png"
        assert [path.name for path in pattern.parent.rglob("*")] == ["a.png"]
        assert mirror.names.url(pattern.parent / "a.png") == "memory://in/a.png"


def test_a_changed_file_has_another_version(memory):
    def version(content):
        memory.pipe("/in/a.png", content)
        with Mirror() as mirror:
            mirror.add(URL("memory://in"))
            return list(mirror.versions.values())

    assert version(b"1") != version(b"2")


def test_no_name_leaves_the_mirror(tmp_path, monkeypatch):
    names = ["in/../../out.png", "in/a//b.png", "in/" + 300 * "x", "in/zero\0.png", "in/good.png", "in/good.png/x.png"]

    class Strange(fsspec.AbstractFileSystem):
        protocol = "strange"

        def info(self, path, **options):
            return {"name": path, "type": "directory"}

        def find(self, path, **options):
            return {name: {"name": name, "type": "file", "size": 1} for name in names}

    register_implementation("strange", Strange, clobber=True)
    with Mirror() as mirror:
        folder = mirror.add(URL("strange://in"))
        assert [path.name for path in mirror.root.rglob("*") if path.is_file()] == ["good.png"]
        assert [url for url, _ in mirror.failed] == [f"strange://{name}" for name in names if name != "in/good.png"]
        assert folder.name == "in"
        with pytest.raises(ValueError, match="names no folder"):
            mirror.add(URL("strange://in/../.."))


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    register_implementation("inplace", InPlace, clobber=True)
    source, url = tmp_path / "source", f"inplace://{tmp_path}/folder/target"
    source.write_text("all of it")
    InPlace.breaks = True
    with pytest.raises(OSError, match=r"target could not be written \(The connection broke\)"):
        remote.upload(source, url)
    assert not remote.exists(url)
    InPlace.breaks = False
    remote.upload(source, url)
    assert remote.exists(url)
    assert (tmp_path / "folder/target").read_text() == "all of it"


def test_parts_of_files(memory, tmp_path):
    memory.pipe({"/x": b"0123456789", "/empty": b""})
    assert remote.read_part("memory://x", 0, 3) == b"012"
    assert remote.read_part("memory://x", -2, None) == b"89"
    assert remote.read_part("memory://empty", 0, 3) == b""
    assert remote.read_part("memory://gone", 0, 3) is None
    with pytest.raises(OSError, match=r"memory://gone could not be fetched \(it is missing\)"):
        remote.fetch("memory://gone", tmp_path / "x")
    with remote.local_copy(URL("memory://x")) as copy:
        assert copy.read_bytes() == b"0123456789"
    assert not copy.exists()


def test_a_missing_package_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(known_implementations, "nowhere", {"class": "nowherefs.FS", "err": "Install it"})
    with pytest.raises(ImportError, match=r"nowhere://x needs a package that is not installed: pip install nowherefs"):
        remote.fetch("nowhere://x", tmp_path / "x")
    with pytest.raises(OSError, match=r"nonsense://x cannot be opened \(Protocol not known: nonsense\)"):
        remote.fetch("nonsense://x", tmp_path / "x")


def test_names_of_files_and_of_folders():
    names = Names({"/t/out": "s3://b/out", "/t/1.png": "s3://b/in/x.png"})
    assert names.url(Path("/t/out/deep/y.png")) == "s3://b/out/deep/y.png"
    assert names.shown(Path("/t/1.png")) == "s3://b/in/x.png"
    assert names.shown(Path("/t/2.png")) == Path("/t/2.png")
