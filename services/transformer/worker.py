"""Starts one of several transformers on a port: `python -m services.transformer.worker PARENT`; see workers.py."""

from __future__ import annotations

import sys

from millrace.service import run_service
from services.transformer.__main__ import serve_worker
from services.transformer.settings import TransformerSettings
from services.transformer.workers import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    run_service("transformer", TransformerSettings, serve_worker)
