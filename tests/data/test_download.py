"""Downloads from a server on this machine."""

import errno
import hashlib
import io
import tarfile
import threading
import zipfile
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deepmrf.data import download, get
from deepmrf.data.download import fetch, unpack
from deepmrf.data.publications import PUBLICATIONS, Archive, Publication


class Handler(BaseHTTPRequestHandler):
    """Serves server.files by name; understands ranges; `breaks` connections are cut half way."""

    def do_GET(self):
        server = self.server
        server.requests.append(self.headers.get("Range"))
        content = server.files.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = 0
        if server.resumes and (wanted := self.headers.get("Range")):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if self.headers.get("If-Range", server.tag) != server.tag:
                start = 0  # another version
            elif start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if not server.endless:
            self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", server.tag)
        self.end_headers()
        body = content[start:]
        if server.breaks:
            server.breaks -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)
        with suppress(OSError):  # the other side hangs up
            for _ in range(200 * server.endless):
                server.sent += self.wfile.write(bytes(1 << 16))

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.requests, server.resumes, server.breaks, server.tag = {}, [], True, 0, '"1"'
    server.endless, server.sent = False, 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


CONTENT = bytes(range(256)) * 100
MD5 = hashlib.md5(CONTENT).hexdigest()
QUIET = {"progress": False, "say": lambda text: None, "pause": 0.0}


def zipped(**files):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/"), content)
    return memory.getvalue()


def test_plain(server, tmp_path):
    server.files["a.bin"] = CONTENT
    fetch(f"{server.url}/a.bin", tmp_path / "a.bin", len(CONTENT), MD5, **QUIET)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]  # no .part, no .tag


def test_half_a_file_is_resumed(server, tmp_path):
    server.files["a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    fetch(f"{server.url}/a.bin", tmp_path / "a.bin", len(CONTENT), MD5, **QUIET)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.requests == ["bytes=1000-"]


def test_broken_connections_are_taken_up_again(server, tmp_path):
    server.files["a.bin"], server.breaks = CONTENT, 2
    fetch(f"{server.url}/a.bin", tmp_path / "a.bin", None, MD5, **QUIET)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.requests == [None, "bytes=12800-", "bytes=19200-"]


def test_giving_up_keeps_what_arrived(server, tmp_path):
    server.files["a.bin"], server.breaks = CONTENT, 2
    with pytest.raises(OSError, match=r"could not be fetched .*19,200 bytes are kept in .*run the same again"):
        fetch(f"{server.url}/a.bin", tmp_path / "a.bin", tries=2, **QUIET)
    assert not (tmp_path / "a.bin").exists()
    fetch(f"{server.url}/a.bin", tmp_path / "a.bin", md5=MD5, **QUIET)


def test_server_without_ranges(server, tmp_path):
    server.files["a.bin"], server.resumes = CONTENT, False
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    fetch(f"{server.url}/a.bin", tmp_path / "a.bin", len(CONTENT), MD5, **QUIET)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_corrupt_half_is_fetched_anew(server, tmp_path):
    server.files["a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    messages = []
    fetch(f"{server.url}/a.bin", tmp_path / "a.bin", len(CONTENT), MD5, **QUIET | {"say": messages.append})
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.requests == ["bytes=1000-", None]
    assert "fetching all of it again" in messages[0]


def test_halves_of_two_versions_never_meet(server, tmp_path):
    server.files["a.bin"], server.breaks = b"old" * 999, 1
    with pytest.raises(OSError, match="could not be fetched"):
        fetch(f"{server.url}/a.bin", tmp_path / "a.bin", tries=1, **QUIET)
    server.files["a.bin"], server.tag = CONTENT, '"2"'
    fetch(f"{server.url}/a.bin", tmp_path / "a.bin", **QUIET)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_complete_or_overlong_part(server, tmp_path):
    server.files["a.bin"] = CONTENT
    for content in (CONTENT, CONTENT + b"more"):
        (tmp_path / "a.bin.part").write_bytes(content)
        fetch(f"{server.url}/a.bin", tmp_path / "a.bin", None, MD5, **QUIET)
        assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_corrupt_file_is_deleted(server, tmp_path):
    server.files["a.bin"] = CONTENT[:-1] + b"x"
    with pytest.raises(ValueError, match=rf"has the md5 \w+ instead of {MD5}, so it was deleted"):
        fetch(f"{server.url}/a.bin", tmp_path / "a.bin", len(CONTENT), MD5, **QUIET)
    server.files["a.bin"] = CONTENT[:-1]
    with pytest.raises(ValueError, match="25,599 bytes instead of 25,600"):
        fetch(f"{server.url}/a.bin", tmp_path / "a.bin", len(CONTENT), MD5, **QUIET)
    assert not list(tmp_path.glob("a.bin*.part"))
    assert not (tmp_path / "a.bin").exists()


def test_unknown_checksums_are_admitted(server, tmp_path):
    server.files["a.bin"] = CONTENT
    messages = []
    fetch(f"{server.url}/a.bin", tmp_path / "a.bin", **QUIET | {"say": messages.append})
    assert messages == [
        f"No checksum is known for a.bin; the downloaded file has the sha256 {hashlib.sha256(CONTENT).hexdigest()}."
    ]


def test_bad_addresses(server, tmp_path):
    with pytest.raises(OSError, match=r"HTTP Error 404: .*moved it"):
        fetch(f"{server.url}/gone.bin", tmp_path / "a.bin", **QUIET)
    assert len(server.requests) == 1  # a file that is not there will not appear
    with pytest.raises(ValueError, match="begins with http"):
        fetch("file:///etc/hostname", tmp_path / "a.bin", **QUIET)


def test_get_unpacks_a_part_and_remembers(server, tmp_path):
    archive = zipped(repo__CamVid__train__a_1__png="image", repo__README="no", repo__CamVid2__b="no")
    server.files["x.zip"] = archive
    source = {"camvid": Publication((Archive("http://example.org/1/x.zip", len(archive), inside="repo/CamVid"),))}
    assert get("camvid", tmp_path / "to", mirror=server.url + "/", sources=source, **QUIET) == tmp_path / "to"
    files = [path.relative_to(tmp_path / "to").as_posix() for path in (tmp_path / "to").rglob("*") if path.is_file()]
    assert sorted(files) == [".x.zip.done", "train/a_1/png"]
    get("camvid", tmp_path / "to", mirror=server.url, sources=source, **QUIET)
    assert len(server.requests) == 1
    get("camvid", tmp_path / "kept", mirror=server.url, sources=source, keep_archives=True, **QUIET)
    assert (tmp_path / "kept" / "x.zip").exists()


def test_archives_that_cannot_be_unpacked_do_not_stay(server, tmp_path):
    server.files["x.zip"] = b"<html>moved</html>"
    source = {"x": Publication((Archive(f"{server.url}/x.zip"),))}
    with pytest.raises(ValueError, match="is not an archive"):
        get("x", tmp_path, sources=source, **QUIET)
    assert not list(tmp_path.iterdir())
    server.files["x.zip"] = zipped(a="1")
    get("x", tmp_path, sources=source, **QUIET)
    assert (tmp_path / "a").exists()


def test_a_body_longer_than_announced_is_not_written_without_end(server, tmp_path):
    server.files["a.bin"], server.endless = CONTENT, True
    with pytest.raises(ValueError, match=r"a\.bin has [\d,]+ bytes instead of 25,600, so it was deleted"):
        fetch(f"{server.url}/a.bin", tmp_path / "a.bin", len(CONTENT), MD5, **QUIET)
    assert not list(tmp_path.glob("a.bin*"))
    assert server.sent < 200 << 16


def damaged(kind):
    """An archive as its publisher might have it: encrypted, of an unknown method, with broken content."""
    memory = io.BytesIO()
    if kind in ("tgz", "tbz", "txz"):
        with tarfile.open(fileobj=memory, mode=f"w:{ {'tgz': 'gz', 'tbz': 'bz2', 'txz': 'xz'}[kind] }") as tar:
            info = tarfile.TarInfo("a")
            info.size = len(CONTENT)
            tar.addfile(info, io.BytesIO(CONTENT))
        content = bytearray(memory.getvalue())
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
        return bytes(content)
    method = {"lzma": zipfile.ZIP_LZMA, "deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2}
    with zipfile.ZipFile(memory, "w", method.get(kind, zipfile.ZIP_STORED)) as archive:
        archive.writestr("a", CONTENT)
    content, directory = bytearray(memory.getvalue()), memory.getvalue().index(b"PK\1\2")
    if kind == "encrypted":
        content[6] |= 1
        content[directory + 8] |= 1
    elif kind == "unknown":
        content[8] = content[directory + 10] = 77
    else:
        content[40:80] = b"\xff" * 40
    return bytes(content)


@pytest.mark.parametrize("kind", ["encrypted", "unknown", "lzma", "deflate", "bzip2", "tgz", "tbz", "txz"])
def test_bad_archives_are_one_sentence_and_do_not_stay(server, tmp_path, kind):
    name = f"x.{kind}" if kind.startswith("t") else "x.zip"
    source = {"x": Publication((Archive(f"{server.url}/{name}"),))}
    server.files[name] = damaged(kind)
    with pytest.raises(ValueError, match=r"is not an archive that can be unpacked \(.*\); fetch it again\.$") as caught:
        get("x", tmp_path, sources=source, **QUIET)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_bytes(damaged(kind))  # by hand, or by a run that was killed
    with pytest.raises(ValueError, match=rf"which the next run does: this one is now .*{name}\.bad\."):
        get("x", tmp_path, sources=source, **QUIET)
    server.files[name] = zipped(b="1")
    get("x", tmp_path, sources=source, **QUIET)
    assert (tmp_path / "b").exists()


def test_archives_put_there_by_hand_are_compared(tmp_path):
    (tmp_path / "x.zip").write_bytes(zipped(a="1"))
    get("x", tmp_path, sources={"x": Publication((Archive("http://example.invalid/x.zip"),))}, **QUIET)
    assert (tmp_path / "a").exists()
    (tmp_path / "y.zip").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"y\.zip was already there but has 4 bytes instead of 9; remove it"):
        get("y", tmp_path, sources={"y": Publication((Archive("http://example.invalid/y.zip", size=9),))}, **QUIET)


def test_get_shows_a_bar(server, tmp_path):
    pytest.importorskip("rich")
    server.files["x.zip"] = zipped(a="1")
    source = {"x": Publication((Archive(f"{server.url}/x.zip"),))}
    get("x", tmp_path, sources=source, **QUIET | {"progress": True})
    assert (tmp_path / "a").read_text() == "1"


def test_sets_that_cannot_be_fetched(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"cityscapes needs a login, .*register at https.*cs/leftImg8bit and .*cs/gtFine"
    ):
        get("cityscapes", tmp_path / "cs")
    with pytest.raises(ValueError, match="no dataset 'imagenet' to download; give one of camvid,"):
        get("imagenet", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 10})())
    with pytest.raises(OSError, match=r"VOCtrainval_11-May-2012\.tar and its contents need 4\.4 GB but"):
        get("voc", tmp_path, **QUIET)


def test_table_of_publications():
    for publication in PUBLICATIONS.values():
        for archive in publication.archives:
            assert bool(archive.content) == bool(publication.by_hand)
            assert archive.url.startswith("http") or publication.by_hand
            assert archive.name.endswith((".zip", ".tar", ".tgz"))
            assert len(archive.md5) in (0, 32)


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "C:/evil", "..\\evil", "a//b"])
def test_paths_cannot_lead_outside(tmp_path, name):
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    (tmp_path / "x.tar").write_bytes(memory.getvalue())
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(name, "x")
    for path in (tmp_path / "x.tar", tmp_path / "x.zip"):
        with pytest.raises(ValueError, match="would land outside its folder"):
            unpack(path, tmp_path / "to" / "deep")
    assert not list(tmp_path.rglob("evil"))


def test_links_are_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tgz", mode="w:gz") as tar:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(info)
    with pytest.raises(ValueError, match="'link', a link or a device; do not trust"):
        unpack(tmp_path / "x.tgz", tmp_path / "to")


def test_old_pythons_are_refused(tmp_path, monkeypatch):
    """Before 3.10.12 and 3.11.4, tarfile has no filter against members that lead outside."""
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(ImportError, match=r"needs Python 3\.10\.12, 3\.11\.4 or .*update Python\.$"):
        unpack(tmp_path / "x.tar", tmp_path / "to")


def test_tar_and_broken_archives(tmp_path):
    (tmp_path / "file").write_text("hello")
    with tarfile.open(tmp_path / "x.tgz", mode="w:gz") as tar:
        tar.add(tmp_path / "file", "./folder/file")
    unpack(tmp_path / "x.tgz", tmp_path / "to")
    assert (tmp_path / "to" / "folder" / "file").read_text() == "hello"
    (tmp_path / "y.zip").write_bytes(b"<html>moved</html>")
    with pytest.raises(
        ValueError, match=r"y\.zip is not an archive that can be unpacked \([^:]*\w\); fetch it again\.$"
    ):
        unpack(tmp_path / "y.zip", tmp_path / "to")


def test_a_full_disk_is_not_tried_again(tmp_path, monkeypatch):
    attempts = []

    def full(url, part, size, progress):
        attempts.append(url)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_fetch_rest", full)
    with pytest.raises(OSError, match="No space left"):
        fetch("http://example.invalid/x.zip", tmp_path / "x.zip", **QUIET)
    assert len(attempts) == 1
