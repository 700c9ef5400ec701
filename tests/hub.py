"""A fake of the Hugging Face hub for `snapshot_download`, served from local folders."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
GATED = "somebody/gated"
PRIVATE, TOKEN = "somebody/private", "hf_token"


@contextmanager
def serve_hub(models: Mapping[str, Path]) -> Iterator[str]:
    """The address of a hub with these models, by id, of which PRIVATE needs TOKEN, and a gated one."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if GATED in path:
                self._send(b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "access is restricted"}, 403)
                return
            if PRIVATE in path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._send(b"", {"X-Error-Code": "RepoNotFound"}, 401)
                return
            for model, folder in models.items():
                files = [file for file in folder.iterdir() if file.is_file()]
                if path == f"/api/models/{model}/revision/main":
                    siblings = [{"rfilename": file.name} for file in files]
                    self._send_json({"id": model, "sha": COMMIT, "siblings": siblings})
                    return
                if path == f"/api/models/{model}/tree/{COMMIT}":
                    self._send_json(
                        [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0"} for f in files]
                    )
                    return
                for file in files:
                    if path == f"/{model}/resolve/{COMMIT}/{file.name}":
                        data = file.read_bytes()
                        etag = f'"{hashlib.sha256(data).hexdigest()}"'
                        self._send(data, {"ETag": etag, "X-Repo-Commit": COMMIT})
                        return
            self._send(b"", {"X-Error-Code": "RepoNotFound"}, 404)

        do_HEAD = do_GET  # noqa: N815

        def _send_json(self, value: object) -> None:
            self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="hub")  # A stop takes so long.
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
