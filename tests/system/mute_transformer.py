"""The transformer of a model whose tokens have no text, with a chat template that it cannot render."""

from typing import Any

from headrace.rpc.server.service import run_service
from headrace_transformer.__main__ import serve
from headrace_transformer.settings import TransformerSettings
from headrace_transformer.text.detokenizer import Detokenizer
from headrace_transformer.text.tokenizer import TextTokenizer


async def fail(*_: Any) -> str:
    raise RuntimeError("no chat today")


if __name__ == "__main__":
    TextTokenizer.render = fail  # type: ignore[method-assign]
    Detokenizer.push = lambda self, token_id: ""  # type: ignore[method-assign]
    Detokenizer.flush = lambda self: ""  # type: ignore[method-assign]
    run_service("transformer", TransformerSettings, serve)
