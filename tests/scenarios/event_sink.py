"""An HTTP server that accepts events and logs their types and ids: `event_sink.py PORT FILE`.

The file has a line for each: type, tab, id, written before the event is acknowledged.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main(port: int, file: Path) -> None:
    with file.open("a", buffering=1) as lines:

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                lines.write(f"{self.headers['ce-type']}\t{self.headers['ce-id']}\n")
                self.send_response(202)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        ThreadingHTTPServer.daemon_threads = True
        ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
