"""The transformer, for which the name of tests/support/name_server.py has the addresses in the file NAME_FILE."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.rpc.server.service import run_service
from headrace_transformer.__main__ import serve
from headrace_transformer.settings import TransformerSettings
from tests.support.name_server import use_file

if __name__ == "__main__":
    use_file(Path(os.environ["NAME_FILE"]))
    run_service("transformer", TransformerSettings, serve)
