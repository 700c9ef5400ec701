"""Models of images and artifacts: by a registry of Debian's, and by one that asks for tokens and cuts connections."""

import base64
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from headrace.errors import StartupError, StartupFault
from headrace.models.downloads import MODEL_FILES
from headrace.models.hub import fetch
from headrace.models.sources import parse_location
from tests.gguf_files import write_gguf
from tests.model.test_gguf import random_model
from tests.support.registry import ARTIFACT, LAYER, PASSWORD, USER, Pushed, archive, real_registry, serve_registry

REPOSITORY = "models/story"
WEIGHTS = bytes(range(256)) * 1000
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS}
GGUF = "application/vnd.ollama.image.model"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path / "cache" / "headrace" / "models"


@pytest.fixture
def pushed():
    """A modelcar of two layers, one of several machines, and an artifact of files."""
    pushed = Pushed()
    in_models = {f"models/{name}": data for name, data in FILES.items()}
    car = pushed.push(
        "car",
        (LAYER, archive({"etc/passwd": b"root", "models/config.json": b"old", "models/run.py": b"x"}), ""),
        (LAYER, archive(in_models), ""),
    )
    pushed.push_index("cars", (pushed.push("none", config=ARTIFACT), "unknown", "unknown"), (car, "linux", "s390x"))
    pushed.push(
        "artifact",
        *(("application/octet-stream", data, name) for name, data in {**FILES, "README.md": b"text"}.items()),
        config=ARTIFACT,
    )
    return pushed


@pytest.fixture
def registry(pushed, tmp_path):
    entry = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    with serve_registry(pushed, REPOSITORY) as registry:
        (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.address: entry}}))
        yield registry


def fetched(address: str, tag: str, patterns=MODEL_FILES, report=lambda _: None) -> Path:
    return fetch(parse_location("m", f"oci://{address}/{REPOSITORY}{tag}"), patterns, report)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.skipif(shutil.which("docker-registry") is None, reason="needs Debian's docker-registry")
def test_images_and_artifacts_of_a_real_registry_are_fetched(pushed, tmp_path):
    write_gguf(tmp_path / "made.gguf", random_model("llama")[0], "Q4_0")
    data = (tmp_path / "made.gguf").read_bytes()
    pushed.push("ollama", (GGUF, data, ""), ("application/vnd.ollama.image.template", b"t", ""), config=ARTIFACT)
    with real_registry("docker-registry", tmp_path, pushed, REPOSITORY) as address:
        for tag in (":car", ":cars", ":artifact"):
            assert contents(fetched(address, tag)) == FILES
        assert (fetched(address, ":ollama", ("*.json",)) / "model.gguf").read_bytes() == data
        with pytest.raises(StartupError, match=r"models/story:nothing is not there$"):
            fetched(address, ":nothing")


def test_a_private_repository_is_read_with_the_credentials_of_docker(registry, pushed, tmp_path):
    folder = fetched(registry.address, ":cars")
    assert contents(folder) == FILES
    assert f"sha256:{folder.name}" in pushed.manifests
    assert fetched(registry.address, f"@sha256:{folder.name}").name == folder.name
    assert registry.leaks == []
    (tmp_path / "config.json").unlink()
    with pytest.raises(StartupError, match=r"may not be read, or is not there; `docker login 127") as refused:
        fetched(registry.address, ":artifact")
    assert not refused.value.is_fault


@pytest.mark.parametrize("tag", [":artifact", ":car"])
def test_a_cut_download_continues_where_it_stopped(registry, pushed, tag):
    registry.cut_after = 100
    folder = fetched(registry.address, tag)
    assert contents(folder) == FILES
    assert "bytes=100-" in registry.ranges
    assert not list(folder.rglob("*.part"))


def test_what_was_fetched_is_used_while_the_registry_is_away(registry):
    folder = fetched(registry.address, ":car")
    reports: list[str] = []
    registry.status = 503
    assert fetched(registry.address, ":car", report=reports.append) == folder
    assert "the files of an earlier start are used" in reports[-1]
    with pytest.raises(StartupFault, match=r"cannot be reached: .* 503 .*MODELS_NETWORK=outer$"):
        fetched(registry.address, ":artifact")


def test_a_wrong_digest_is_a_fault_and_nothing_is_kept(registry, pushed, cache):
    for digest in pushed.blobs:
        pushed.blobs[digest] = pushed.blobs[digest][::-1]
    with pytest.raises(StartupFault, match=r"model\.safetensors arrived with another digest"):
        fetched(registry.address, ":artifact", ("*.safetensors",))
    assert not list(cache.rglob("*.safetensors"))
    kind, data = pushed.manifests["artifact"]
    digest = next(name for name, (_, same) in pushed.manifests.items() if same == data and name.startswith("sha256:"))
    pushed.manifests[digest] = (kind, data + b" ")
    with pytest.raises(StartupFault, match="arrived with another digest"):
        fetched(registry.address, f"@{digest}")


def linked(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("climbs", tarfile.TarInfo("models/../../config.json")),
        ("absolute", linked("models/config.json", "/etc/passwd")),
        ("hard", linked("models/config.json", "etc/passwd", tarfile.LNKTYPE)),
        ("device", linked("models/config.json", "", tarfile.CHRTYPE)),
        ("removes", tarfile.TarInfo("models/.wh.config.json")),
    ],
)
def test_a_layer_writes_nothing_outside_its_folder(registry, pushed, cache, name, member):
    pushed.push(name, (LAYER, archive({"etc/passwd": b"x", name: member}), ""))
    with pytest.raises(StartupError, match=r"^model m: oci://.*: a layer cannot be unpacked: [^\n]*$"):
        fetched(registry.address, f":{name}")
    assert not list(cache.rglob("config.json"))
    assert not (cache.parent / "config.json").exists()


def test_a_link_within_the_model_is_a_second_name(registry, pushed):
    layer = archive(
        {
            "models/config.json": linked("models/config.json", "blobs/real.json"),
            "models/blobs/real.json": b"{}",
            "models/other.json": linked("models/other.json", "models/blobs/real.json", tarfile.LNKTYPE),
        }
    )
    pushed.push("links", (LAYER, layer, ""))
    folder = fetched(registry.address, ":links")
    assert (folder / "config.json").read_bytes() == (folder / "other.json").read_bytes() == b"{}"
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ((LAYER, b"no archive", ""), "a layer cannot be unpacked"),
        (("application/vnd.oci.image.layer.v1.tar+zstd", b"", ""), "layers in zstd are not read"),
        ((LAYER, archive({"models/config.json": WEIGHTS})[:300], ""), "a layer cannot be unpacked"),
    ],
)
def test_a_layer_that_cannot_be_read_is_refused_in_one_line(registry, pushed, layer, message):
    pushed.push("bad", layer)
    with pytest.raises(StartupError, match=message) as refused:
        fetched(registry.address, ":bad")
    assert "\n" not in str(refused.value)
