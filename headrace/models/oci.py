"""Models in registries: `oci://`, by the OCI distribution specification (https://github.com/opencontainers/distribution-spec).

An image has its model in `/models`, as KServe's modelcars do; its layers are archives. An artifact has files as layers,
named by their annotations (ORAS, ModelPack), or by their media type: those of Ollama and Docker are a GGUF file. The
digest of the manifest names the contents, and every manifest and layer must have its own digest.

A layer of an image is an archive that anybody may have made: only plain files below one folder are written, and only
those that services read. A link is written as a second name of its target, so nothing on the disk leads out of it.

A registry speaks HTTP with Docker's token flow, see https://distribution.github.io/distribution/spec/auth/token.
Credentials are those of `docker login`, in `config.json` of DOCKER_CONFIG or ~/.docker, without its helpers; without
any the repository is read anonymously. Registries on loopback speak HTTP, as Docker has it, all others HTTPS.
"""

import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import tarfile
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import httpx2

from headrace.errors import StartupError, StartupFault
from headrace.models.downloads import Listing, RemoteFile, is_plain
from headrace.models.sources import parse_image

_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_IMAGES = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_IMAGE_FOLDER = "models"
_NAMES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_UNPACK = "io.deis.oras.content.unpack"
_GGUF = ("application/vnd.ollama.image.model", "application/vnd.docker.ai.gguf.v3")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_MAX_MANIFEST_BYTES = 4 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REMOVED = ".wh."  # How a layer removes a file of an earlier one.

_DOCKER_HUB = "docker.io"
_DOCKER_HUB_API = "registry-1.docker.io"
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"  # In config.json.
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+)(:[0-9]+)?")
_TIMEOUT_S = 30.0  # Of connecting, and of each read.
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class Registry(httpx2.Auth):
    """HTTP to one repository, for one thread: redirects without credentials, errors in a line that names `location`."""

    def __init__(self, location: str, host: str, repository: str) -> None:
        self.location = location
        self._host = host
        self._scheme = "http" if _LOOPBACK.fullmatch(host) else "https"
        if host == _DOCKER_HUB:
            host, repository = _DOCKER_HUB_API, repository if "/" in repository else f"library/{repository}"
        self._authorization = ""
        self._client = httpx2.Client(
            base_url=f"{self._scheme}://{host}/v2/{repository}/",
            auth=self,
            headers={"accept-encoding": "identity"},
            follow_redirects=True,
            timeout=_TIMEOUT_S,
            limits=httpx2.Limits(max_keepalive_connections=0),  # Nothing closes it.
        )

    @contextmanager
    def get(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """The answer below the repository; the block raises ConnectionError, and StartupError for a refusal."""
        try:
            with self._client.stream("GET", path, headers=headers) as response:
                self._check(response)
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConnectionError(str(error) or type(error).__name__) from None

    def sync_auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        if self._authorization:
            request.headers["authorization"] = self._authorization
        response = yield request
        if response.status_code != 401:
            return
        credentials = _credentials(_DOCKER_HUB_KEY if self._host == _DOCKER_HUB else self._host)
        self._authorization = f"Basic {credentials}" if credentials else ""
        challenge = response.headers.get("www-authenticate", "")
        asked = dict(_PARAMETER.findall(challenge))
        if challenge.lower().startswith("bearer") and asked.get("realm", "").startswith(f"{self._scheme}://"):
            wanted = {name: asked[name] for name in ("service", "scope") if name in asked}
            basic = {"authorization": self._authorization} if credentials else {}
            answer = yield self._client.build_request("GET", asked["realm"], params=wanted, headers=basic)
            self._check(answer)
            try:
                token = json.loads(answer.read())
                self._authorization = f"Bearer {token.get('token') or token['access_token']}"
            except (ValueError, KeyError, AttributeError):
                raise StartupError(f"{self.location}: the registry's token cannot be read") from None
        if self._authorization:
            request.headers["authorization"] = self._authorization
            yield request

    def _check(self, response: httpx2.Response) -> None:
        """Raises ConnectionError where a later attempt may succeed, else StartupError, unless it is a success."""
        status = f"the registry answers {response.status_code} {response.reason_phrase}"
        if response.status_code in (401, 403):
            raise StartupError(f"{self.location} may not be read, or is not there; `docker login {self._host}` helps")
        if response.status_code == 404:
            raise StartupError(f"{self.location} is not there")
        if response.status_code == 429 or response.status_code >= 500:
            raise ConnectionError(status)
        if not response.is_success:
            raise StartupError(f"{self.location}: {status}")


def _credentials(key: str) -> str:
    """Base64 of user and password, as config.json has it; empty without."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
    try:
        entry = json.loads((folder / "config.json").read_text()).get("auths", {}).get(key, {})
        return str(entry.get("auth", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def resolve(location: str) -> Listing:
    """What a checked URL names; raises ConnectionError, and StartupError with one line."""
    host, repository, reference = parse_image(location)
    registry = Registry(location, host, repository)
    try:
        manifest, digest = _manifest(registry, reference)
        if "manifests" in manifest:
            manifest, digest = _manifest(registry, _for_this_machine(manifest["manifests"])["digest"])
        folder = _IMAGE_FOLDER if manifest["config"]["mediaType"] in _IMAGES else ""
        files = tuple(file for layer in manifest["layers"] if (file := _file(registry, layer, folder)) is not None)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise StartupError(f"{location} has no manifest of an image or an artifact") from None
    return Listing(digest, files)


def _manifest(registry: Registry, reference: str) -> tuple[dict[str, Any], str]:
    with registry.get(f"manifests/{reference}", {"accept": ", ".join((*_MANIFESTS, *_INDEXES))}) as response:
        data = next(response.iter_raw(_MAX_MANIFEST_BYTES), b"")
    digest = hashlib.sha256(data).hexdigest()
    if ":" in reference and reference != f"sha256:{digest}":
        raise StartupFault(f"{registry.location}: the manifest {reference} arrived with another digest")
    return json.loads(data), digest


def _for_this_machine(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest for this machine, else the first that is no attestation: a model suits every machine."""
    machine = _MACHINES.get(platform.machine(), "")
    usable = [each for each in manifests if each.get("platform", {}).get("os") != "unknown"]
    own = [each for each in usable if each.get("platform", {}).get("architecture") == machine]
    return (own or usable)[0]


def _file(registry: Registry, layer: Mapping[str, Any], folder: str) -> RemoteFile | None:
    """A layer as a file; None for one that has no part of the model."""
    digest, kind = str(layer["digest"]), str(layer["mediaType"])
    annotations = layer.get("annotations") or {}
    if not _DIGEST.fullmatch(digest):
        raise StartupError(f"{registry.location}: the digest {digest!r} is not one of sha256")
    sha256, size, read = digest.partition(":")[2], int(layer["size"]), partial(_read, registry, digest)
    name = next((str(annotations[key]) for key in _NAMES if annotations.get(key)), "")
    is_archive = folder or annotations.get(_UNPACK) == "true" or ("tar" in kind and not name.endswith(".gguf"))
    if is_archive and kind.endswith("zstd"):
        raise StartupError(f"{registry.location}: layers in zstd are not read; build the image with gzip")
    if is_archive:
        # A marker of this name says that the archive was unpacked.
        found = partial(_unpack, registry.location, folder)
        return RemoteFile(f".layer-{sha256}", size, read, sha256, unpack=found)
    name = name or ("model.gguf" if kind in _GGUF else "")
    return RemoteFile(name, size, read, sha256) if is_plain(name) else None


def _read(registry: Registry, digest: str, start: int) -> Iterator[bytes]:
    with registry.get(f"blobs/{digest}", {"range": f"bytes={start}-"} if start else {}) as response:
        skipped = start if response.status_code == 200 else 0  # A registry without ranges begins anew.
        for data in response.iter_raw():
            if len(data) > skipped:
                yield data[skipped:]
            skipped = max(0, skipped - len(data))


def _unpack(location: str, root: str, archive: Path, folder: Path) -> None:
    """Writes what the archive has below `root`, which "" says is all of it, into the folder; raises StartupError."""
    links: list[tuple[str, str]] = []
    try:
        with tarfile.open(archive) as members:
            for member in members:
                if member.size > shutil.disk_usage(folder).free:
                    raise ValueError(f"{member.name} has {member.size / 1e6:.1f} MB, more than the disk")
                name = _name(member.name, root)
                if PurePosixPath(name).name.startswith(_REMOVED):
                    raise ValueError(f"{member.name} removes a file of an earlier layer; build the image without that")
                if not is_plain(name) or member.isdir():
                    continue
                if member.issym():
                    links.append(
                        (name, _name(os.path.normpath(f"{PurePosixPath(member.name).parent}/{member.linkname}"), root))
                    )
                elif member.islnk():
                    links.append((name, _name(member.linkname, root)))
                elif member.isfile() and not member.issparse():
                    _write(members, member, folder / name)
                else:
                    raise ValueError(f"{member.name} is not a file")
        for name, target in links:
            if not is_plain(target) or not (folder / target).is_file():
                raise ValueError(f"{name} is a link that leads out of the model")
            (folder / name).unlink(missing_ok=True)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(folder / target, folder / name)
    except (ValueError, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise StartupError(f"{location}: a layer cannot be unpacked: {str(error).splitlines()[0]}") from None


def _name(path: str, root: str) -> str:
    """A member's path relative to `root`; "" for one that is not below it. Raises ValueError for one that climbs."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{path} leads out of the archive")
    if root and parts[:1] != [root]:
        return ""
    return "/".join(parts[1:] if root else parts)


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unpacking")
    source = members.extractfile(member)
    if source is None:
        raise ValueError(f"{member.name} is not a file")
    try:
        with source, unfinished.open("wb") as output:
            shutil.copyfileobj(source, output, 1 << 20)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
