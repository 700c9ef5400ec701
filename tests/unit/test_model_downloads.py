"""Files of remote places: complete or absent, continued, shared by those who want the same, refused in one line."""

import errno
import shutil
import threading
from collections import namedtuple
from hashlib import sha256

import pytest

from headrace.errors import StartupError, StartupFault
from headrace.models import downloads
from headrace.models.downloads import Listing, RemoteFile, fetch_listed, is_plain

DATA = b"0123456789"
DIGEST = "d" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headrace" / "models"


class Remote:
    """A file whose connection breaks after `parts`, one after another; then all of the rest comes."""

    def __init__(self, *parts, name="config.json"):
        self.offsets = []
        self._parts = list(parts)
        self.file = RemoteFile(name, len(DATA), self.read, sha256(DATA).hexdigest())

    def read(self, start):
        self.offsets.append(start)
        length = self._parts.pop(0) if self._parts else len(DATA)
        yield DATA[start : start + length]
        if start + length < len(DATA):
            raise ConnectionError("reset")


def fetch(*files, patterns=("*.json",), show=lambda _: None):
    return fetch_listed("s3://bucket/m", patterns, lambda: Listing(DIGEST, files), show)


def test_two_that_want_the_same_share_one_download():
    started, proceed = threading.Event(), threading.Event()
    reads, reports = [], []

    def read(start):
        reads.append(start)
        started.set()
        assert proceed.wait(20)
        yield DATA

    file = RemoteFile("config.json", len(DATA), read)
    waiting = threading.Event()

    def show(text):
        reports.append(text)
        waiting.set()

    first = threading.Thread(target=fetch, args=(file,))
    second = threading.Thread(target=fetch, args=(file,), kwargs={"show": show})
    first.start()
    assert started.wait(20)
    second.start()
    assert waiting.wait(20)
    proceed.set()
    for thread in (first, second):
        thread.join(20)
    assert (reads, reports) == ([0], ["another process fetches it"])
    folder = fetch(file)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_full_disk_is_one_line_before_and_during_a_download(monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(5))
    with pytest.raises(StartupFault, match=r"0\.0 MB are missing, and the disk has 0\.0 MB$"):
        fetch(Remote().file)
    monkeypatch.undo()

    def read(start):
        yield from ()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StartupError, match=r"^s3://bucket/m: .*: No space left on device$") as refused:
        fetch(RemoteFile("config.json", 10, read))
    assert refused.value.is_fault


def test_a_cache_that_may_not_be_written_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartupError, match=r"^s3://bucket/m: .*file.*: Not a directory$") as refused:
        fetch(Remote().file)
    assert not refused.value.is_fault


def test_only_what_matches_is_fetched_and_an_only_gguf_file(cache):
    weights, text = Remote(name="model.safetensors"), Remote(name="a/notes.txt")
    folder = fetch(Remote().file, weights.file, text.file, Remote(name="q4.gguf").file)
    assert {path.name for path in folder.iterdir()} == {"config.json", "q4.gguf"}
    assert weights.offsets == text.offsets == []
    for others in ([text.file], [Remote(name="a/q4.gguf").file, Remote(name="a/q8.gguf").file]):
        with pytest.raises(StartupError, match="has no file of a model"):
            fetch(*others)


def test_the_folder_below_that_alone_has_a_model_is_the_result(cache):
    assert fetch(Remote(name="sub/config.json").file).name == "sub"
    shutil.rmtree(cache)
    assert fetch(Remote(name="a/config.json").file, Remote(name="b/config.json").file).name == DIGEST


def test_an_earlier_listing_serves_while_the_place_is_away_if_it_has_everything():
    def away():
        raise ConnectionError("refused")

    folder = fetch(Remote().file, Remote(name="model.safetensors").file)
    reports = []
    assert fetch_listed("s3://bucket/m", ["*.json"], away, reports.append) == folder
    assert reports == ["cannot be reached (refused); the files of an earlier start are used"]
    for location, patterns in (("s3://bucket/m", ["*.safetensors"]), ("s3://bucket/n", ["*.json"])):
        with pytest.raises(StartupFault, match="cannot be reached: refused"):
            fetch_listed(location, patterns, away, reports.append)


@pytest.mark.parametrize("name", ["config.json", "a/b/model.safetensors", "q4_k.gguf"])
def test_plain_names(name):
    assert is_plain(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", "../config.json", "/config.json", "a//config.json", "a/../config.json", "./config.json"),
        *(".config.json", ".git/config.json", "a/", "config.json/", "config.json\0", "model.bin", "model.py"),
        downloads.LISTING,
    ],
)
def test_other_names_are_not_written(name):
    assert not is_plain(name)
