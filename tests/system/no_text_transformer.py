"""The transformer of a model that gives special tokens alone, which have no text."""

from __future__ import annotations

from millrace.rpc.service import run_service
from services.transformer.__main__ import serve
from services.transformer.settings import TransformerSettings
from services.transformer.text.detokenizer import Detokenizer

if __name__ == "__main__":
    Detokenizer.push = lambda self, token_id: ""  # type: ignore[method-assign]
    Detokenizer.flush = lambda self: ""  # type: ignore[method-assign]
    run_service("transformer", TransformerSettings, serve)
