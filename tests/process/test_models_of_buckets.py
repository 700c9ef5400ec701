"""Models of buckets: S3 by moto's server; the others as far as their packages go without a server."""

import importlib
import os
import socket
import sys
from importlib.util import find_spec
from urllib.request import Request, urlopen

import pytest

from headrace.errors import StartupError, StartupFault
from headrace.models import buckets
from headrace.models.downloads import MODEL_FILES
from headrace.models.hub import fetch
from headrace.models.sources import parse_location
from tests.gguf_files import write_gguf
from tests.model.test_gguf import random_model

pytestmark = pytest.mark.skipif(find_spec("s3fs") is None, reason="needs the extra `buckets`")
BLOCK = 64 << 10
WEIGHTS = os.urandom(10 * BLOCK + 1)  # More than one round of requests.
SIGNED = {"Authorization": "AWS ann:x", "Content-Type": "application/octet-stream"}
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"[]"}


@pytest.fixture(scope="module")
def server():
    threaded = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    threaded.start()
    yield "http://{}:{}".format(*threaded.get_host_and_port())
    threaded.stop()


@pytest.fixture
def put(server, monkeypatch, tmp_path):
    """Writes an object of the bucket `models`, which is empty at first; the environment names the server."""
    for name, value in {
        "XDG_CACHE_HOME": str(tmp_path),
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "ann",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)

    monkeypatch.setattr(buckets, "_BLOCK_BYTES", BLOCK)

    def send(path: str, data: bytes = b"") -> None:
        urlopen(Request(f"{server}/models{path}", data, SIGNED, method="PUT"), timeout=60).close()

    urlopen(Request(f"{server}/moto-api/reset", b"", method="POST"), timeout=60).close()
    send("")
    return send


def fetched(location, patterns=MODEL_FILES, report=lambda _: None):
    return fetch(parse_location("m", location), patterns, report)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_prefix_is_a_folder_and_a_change_of_it_another_one(put):
    for name, data in {**FILES, "run.py": b"x", ".git/config.json": b"{}"}.items():
        put(f"/chat/story/{name}", data)
    put("/chat/story-2/config.json", b"other")
    reports: list[str] = []
    folder = fetched("s3://models/chat/story/", report=reports.append)
    assert contents(folder) == FILES
    assert reports[0] == "fetching"
    assert reports[-1] == "fetched 0.7 of 0.7 MB"
    assert fetched("s3://models/chat/story", report=reports.append) == folder
    assert reports[-1] == "fetching"
    put("/chat/story/config.json", b'{"a": 1}')
    changed = fetched("s3://models/chat/story", ("*.json",))
    assert changed != folder
    assert contents(changed) == {"config.json": b'{"a": 1}', "tokenizer.json": b"[]"}
    assert contents(folder) == FILES


def test_an_only_gguf_file_is_fetched_whatever_the_patterns_are(put, tmp_path):
    write_gguf(tmp_path / "made.gguf", random_model("llama")[0], "Q4_0")
    data = (tmp_path / "made.gguf").read_bytes()
    put("/chat/sub/story-q4.gguf", data)
    for location in ("s3://models/chat", "s3://models/chat/sub/story-q4.gguf"):
        link = fetched(location, ("*.json",)) / "model.gguf"
        assert (link.resolve().name, link.read_bytes() == data) == ("story-q4.gguf", True)


def test_a_bucket_may_have_versions(put):
    put("?versioning", b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>")
    for name, data in FILES.items():
        put(f"/m/{name}", data)
    assert contents(fetched("s3://models/m")) == FILES


def test_a_cut_download_continues_after_a_restart(put, tmp_path):
    for name, data in FILES.items():
        put(f"/m/{name}", data)
    folder = fetched("s3://models/m", ("*.json",))
    (folder / ".model.safetensors.part").write_bytes(WEIGHTS[: 7 * BLOCK + 5])
    reports: list[str] = []
    assert contents(fetched("s3://models/m", report=reports.append)) == FILES
    assert reports[1:] == ["fetched 0.5 of 0.7 MB", "fetched 0.7 of 0.7 MB"]


def test_a_file_that_changes_meanwhile_is_not_kept(put, monkeypatch):
    put("/m/config.json", b"{}")
    listing = buckets.resolve("s3://models/m")
    monkeypatch.setattr(buckets, "resolve", lambda location: listing)
    put("/m/config.json", b"[]")
    with pytest.raises(StartupFault, match=r"config\.json has changed meanwhile"):
        fetched("s3://models/m")
    put("/m/config.json", b"{}")
    assert contents(fetched("s3://models/m")) == {"config.json": b"{}"}


def test_what_is_not_there_is_refused_in_one_line(put):
    for location, message in (("s3://models/none", "has no file of a model"), ("s3://none/m", "does not exist")):
        with pytest.raises(StartupError, match=rf"^model m: {location} {message}$") as refused:
            fetched(location)
        assert not refused.value.is_fault


def test_without_credentials_or_a_server_the_error_says_what_to_do(put, monkeypatch, tmp_path):
    put("/m/config.json", b"{}")
    folder = fetched("s3://models/m")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert fetched("s3://models/m") == folder
    with pytest.raises(StartupFault, match=r"s3://models/n cannot be reached: .*MODELS_NETWORK=outer$"):
        fetched("s3://models/n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StartupError, match=r"Unable to locate credentials; docs/models\.md names") as refused:
        fetched("s3://models/m")
    assert not isinstance(refused.value, StartupFault)


def test_a_server_that_does_not_answer_is_not_waited_for(put, monkeypatch):
    monkeypatch.setattr(buckets, "_LISTING_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*mute.getsockname()))
        with pytest.raises(StartupFault, match=r"s3://models/m cannot be reached: no listing within 0\.5 s"):
            fetched("s3://models/m")


@pytest.mark.parametrize(("location", "package"), [("s3://b/m", "s3fs"), ("gs://b/m", "gcsfs"), ("az://b/m", "adlfs")])
def test_a_missing_package_is_named(monkeypatch, location, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "registry", {})  # Of classes in use.
    with pytest.raises(StartupError, match=rf"needs the package {package}: install headrace with its extra `buckets`"):
        fetched(location)
