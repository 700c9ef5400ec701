"""The transformer with addresses of a test: of a name in the file NAME_FILE, or of services at NAME_SERVER_PORT."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.rpc.server.service import run_service
from headrace_transformer.__main__ import serve
from headrace_transformer.settings import TransformerSettings
from tests.support.name_server import use_file
from tests.support.service_records import ask_at

if __name__ == "__main__":
    if file := os.environ.get("NAME_FILE"):
        use_file(Path(file))
    else:
        ask_at(int(os.environ["NAME_SERVER_PORT"]))
    run_service("transformer", TransformerSettings, serve)
