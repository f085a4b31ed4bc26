"""The downloader: a server that is interrupted, sends the rest, or sends something else."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bitcycle.dataset.sources import fetch, unpack
from bitcycle.errors import DataError

CONTENT = bytes(range(256)) * 5000
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def server():
    """Address of a file that the server sends; `server.handler` says up to which byte, and whether ranges are known."""

    class Handler(BaseHTTPRequestHandler):
        end, ranges = len(CONTENT), True
        asked: list[str | None] = []  # noqa: RUF012

        def do_GET(self):
            wanted = self.headers.get("Range")
            type(self).asked.append(wanted)
            begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
            if begin >= len(CONTENT):
                return self.send_error(416)
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(CONTENT) - begin))
            self.end_headers()
            return self.wfile.write(CONTENT[begin : self.end])

        def log_message(self, *_):
            pass

    Handler.asked = []
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.handler = Handler
    found.address = f"http://127.0.0.1:{found.server_port}/archive.zip"
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def test_an_interrupted_download_goes_on_where_it_stopped(server, tmp_path):
    file = tmp_path / "data" / "archive.zip"
    server.handler.end = 700_000
    with pytest.raises(DataError, match=r"700000 of 1280000 bytes arrived; run the same command again.*Put it there"):
        fetch(server.address, file, "Put it there.", MD5)
    assert not file.exists()
    server.handler.end = len(CONTENT)
    assert fetch(server.address, file, "", MD5).read_bytes() == CONTENT
    assert fetch(server.address, file, "", MD5) == file  # asks nothing
    assert server.handler.asked == [None, "bytes=700000-"]


@pytest.mark.parametrize(("left", "ranges"), [(CONTENT[:10], False), (CONTENT + b"another file", True)])
def test_what_cannot_be_continued_begins_again(server, tmp_path, left, ranges):
    """A server that does not know ranges sends everything; one that does has nothing after what is there."""
    (tmp_path / "archive.zip.part").write_bytes(left)
    server.handler.ranges = ranges
    assert fetch(server.address, tmp_path / "archive.zip", "", MD5).read_bytes() == CONTENT


def test_a_damaged_file_is_refused_and_fetched_again(server, tmp_path):
    (tmp_path / "archive.zip.part").write_bytes(b"other beginning")
    with pytest.raises(DataError, match=f"MD5 checksum is .* instead of {MD5}"):
        fetch(server.address, tmp_path / "archive.zip", "", MD5)
    assert fetch(server.address, tmp_path / "archive.zip", "", MD5).read_bytes() == CONTENT


def test_a_file_that_is_not_there(server, tmp_path):
    server.handler.do_GET = lambda self: self.send_error(404)
    with pytest.raises(DataError, match=r"archive\.zip is missing and cannot be downloaded .*404.*Put it there"):
        fetch(server.address, tmp_path / "archive.zip", "Put it there.")


def test_unpacking_is_whole_or_nothing(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("top/inner/file.txt", "text")
        archive.writestr("other.txt", "text")
    folder = unpack(tmp_path / "a.zip", tmp_path / "data", "top")
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*.*")] == ["inner/file.txt"]
    (tmp_path / "torn.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:50])
    with pytest.raises(DataError, match=r"cannot unpack .*torn\.zip"):
        unpack(tmp_path / "torn.zip", tmp_path / "torn")
    assert not (tmp_path / "torn").exists()
