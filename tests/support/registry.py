"""Registries of models for tests: Debian's `docker-registry`, and a stand-in with tokens that cuts downloads."""

import base64
import hashlib
import io
import json
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from tests.support.free_ports import free_predictor_port

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG = "application/vnd.oci.image.config.v1+json"
ARTIFACT = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
USER, PASSWORD, TOKEN = "ann", "secret", "a-token"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def archive(files: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    """A layer with these members: contents, or anything else as `tarfile` has it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as members:
        for name, contents in files.items():
            member = contents if isinstance(contents, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(contents, bytes):
                member.size = len(contents)
            members.addfile(member, io.BytesIO(contents) if isinstance(contents, bytes) else None)
    return data.getvalue()


@dataclass
class Pushed:
    """What a client has pushed: blobs by digest, manifests by tag and by digest with their media types."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def push(self, tag: str, *layers: tuple[str, bytes, str], config: str = CONFIG) -> str:
        """A manifest with layers of (media type, contents, title); returns its digest."""
        described = [
            {"mediaType": kind, **self._blob(data), **({"annotations": {TITLE: title}} if title else {})}
            for kind, data, title in layers
        ]
        return self._manifest(
            tag, MANIFEST, {"config": {"mediaType": config, **self._blob(b"{}")}, "layers": described}
        )

    def push_index(self, tag: str, *manifests: tuple[str, str, str]) -> str:
        """An index of (digest, operating system, architecture)."""
        return self._manifest(
            tag,
            INDEX,
            {
                "manifests": [
                    {
                        "mediaType": MANIFEST,
                        "digest": digest,
                        "size": len(self.manifests[digest][1]),
                        "platform": {"os": system, "architecture": machine},
                    }
                    for digest, system, machine in manifests
                ]
            },
        )

    def _blob(self, data: bytes) -> dict[str, object]:
        self.blobs[digest_of(data)] = data
        return {"digest": digest_of(data), "size": len(data)}

    def _manifest(self, tag: str, kind: str, value: dict[str, object]) -> str:
        data = json.dumps({"schemaVersion": 2, "mediaType": kind, **value}).encode()
        self.manifests[tag] = self.manifests[digest_of(data)] = (kind, data)
        return digest_of(data)


@contextmanager
def real_registry(program: str, folder: Path, pushed: Pushed, repository: str) -> Iterator[str]:
    """The address of a registry of Debian's package with what was pushed."""
    address = f"127.0.0.1:{free_predictor_port()}"
    settings = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": address},
    }
    (folder / "config.yml").write_text(json.dumps(settings))
    process = subprocess.Popen(
        [program, "serve", str(folder / "config.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        base = f"http://{address}/v2/"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(OSError), urlopen(base, timeout=5):
                break
            time.sleep(0.02)
        for digest, data in pushed.blobs.items():
            with urlopen(Request(f"{base}{repository}/blobs/uploads/", b"", method="POST"), timeout=60) as begun:
                place = begun.headers["Location"]
            binary = {"Content-Type": "application/octet-stream"}  # It would read a form.
            urlopen(Request(f"{place}&digest={digest}", data, binary, method="PUT"), timeout=60).close()
        for reference, (kind, data) in pushed.manifests.items():
            put = Request(f"{base}{repository}/manifests/{reference}", data, {"Content-Type": kind}, method="PUT")
            urlopen(put, timeout=60).close()
        yield address
    finally:
        process.terminate()
        process.wait(20)


@dataclass
class StandIn:
    """A registry that gives blobs by redirects to a storage, to callers with a token, which only `USER` gets."""

    address: str
    cut_after: int = 0  # Bytes of the next longer blob after which the connection is closed.
    status: int = 0  # Of every answer, unless it is 0.
    ranges: list[str] = field(default_factory=list)  # Of requests for blobs.
    leaks: list[str] = field(default_factory=list)  # Authorizations that the storage got.


@contextmanager
def serve_registry(pushed: Pushed, repository: str) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, authorization = urlsplit(self.path).path, self.headers.get("Authorization")
            if registry.status:
                self._send(b"", {}, registry.status)
            elif path.startswith("/storage/"):
                registry.leaks += [authorization] if authorization else []
                self._send_blob(pushed.blobs[path.removeprefix("/storage/")])
            elif path == "/token":
                wanted = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
                is_right = authorization == f"Basic {wanted}" and f"repository:{repository}:pull" in unquote(self.path)
                self._send(json.dumps({"token": TOKEN}).encode() if is_right else b"", {}, 200 if is_right else 401)
            elif authorization != f"Bearer {TOKEN}":
                challenge = f'Bearer realm="http://{registry.address}/token",service="here",scope="repository:{repository}:pull"'
                self._send(b"", {"WWW-Authenticate": challenge}, 401)
            else:
                kind, _, reference = path.removeprefix(f"/v2/{repository}/").partition("/")
                if kind == "blobs" and reference in pushed.blobs:
                    self._send(b"", {"Location": f"http://localhost:{server.server_port}/storage/{reference}"}, 307)
                elif kind == "manifests" and reference in pushed.manifests:
                    media_type, data = pushed.manifests[reference]
                    self._send(data, {"Content-Type": media_type})
                else:
                    self._send(b"", {}, 404)

        def _send_blob(self, data: bytes) -> None:
            asked = self.headers.get("Range", "")
            registry.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-") or 0)
            cut = registry.cut_after if registry.cut_after < len(data) else 0
            registry.cut_after -= cut
            self._send(data[start:], {"Content-Range": f"bytes {start}-{len(data)}"}, 206 if asked else 200, cut)

        def _send(self, body: bytes, headers: Mapping[str, str], status: int = 200, cut: int = 0) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[:cut] if cut else body)
            self.close_connection = self.close_connection or bool(cut)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry = StandIn(f"127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="registry")
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
