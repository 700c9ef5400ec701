"""Starts the transformer, or several on one port."""

from __future__ import annotations

from headrace.rpc.server.service import run_service
from headrace_transformer.keys import KeyFile
from headrace_transformer.settings import TransformerSettings
from headrace_transformer.supervisor import open_page, supervise


async def serve(settings: TransformerSettings) -> None:
    """Runs one transformer, or the parent of several."""
    if settings.workers > 1:
        await supervise(settings)
    else:
        await _serve(settings)


async def serve_worker(settings: TransformerSettings, page: int) -> None:
    """Runs one of several transformers; `page` is a descriptor, see supervisor.py."""
    open_page(page)
    # It listens once it can serve; until then other workers take the connections.
    await _serve(settings.model_copy(update={"listen": "take-over", "metrics_port": 0}))


async def _serve(settings: TransformerSettings) -> None:
    keys = KeyFile(settings.keys, settings.key_digests) if settings.keys and settings.key_digests else None
    # Wrong settings are reported before the rest is imported.
    from headrace_transformer.transformer import Transformer

    await Transformer(settings).run(keys)


if __name__ == "__main__":
    run_service("transformer", TransformerSettings, serve)
