"""Starts one of several transformers on a port: `python -m headrace_transformer.worker PARENT PAGE`.

The parent is supervisor.py.
"""

from __future__ import annotations

import sys
from functools import partial

from headrace.processes import end_with_parent
from headrace.rpc.server.service import run_service
from headrace_transformer.__main__ import serve_worker
from headrace_transformer.settings import TransformerSettings

if __name__ == "__main__":
    page = int(sys.argv.pop())
    end_with_parent(int(sys.argv.pop()))
    run_service("transformer", TransformerSettings, partial(serve_worker, page=page))
