"""Starts the transformer, or several on one port.

`python -m headrace_transformer PARENT PAGE` is one of the several, see supervisor.py.
"""

import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from headrace.processes import end_with_parent
from headrace.rpc.server.service import run_service
from headrace.telemetry.page import MetricsPage
from headrace_transformer.keys import KeyFile
from headrace_transformer.settings import TransformerSettings
from headrace_transformer.supervisor import supervise


async def serve(settings: TransformerSettings) -> None:
    """Runs one transformer, or the parent of several."""
    if settings.workers > 1:
        await supervise(settings)
    else:
        await _serve(settings)


async def serve_worker(settings: TransformerSettings, page: int) -> None:
    """Runs one of several transformers, with its Prometheus page at the port `page`, see supervisor.py."""
    MetricsPage("127.0.0.1", page, shares_port=True)
    # It listens once it can serve; until then other workers take the connections.
    await _serve(settings.model_copy(update={"listen": "take-over", "metrics_port": 0}))


async def _serve(settings: TransformerSettings) -> None:
    keys = KeyFile(settings.keys, settings.key_digests) if settings.keys and settings.key_digests else None
    # Wrong settings are reported before the rest is imported.
    from headrace_transformer.transformer import Transformer

    await Transformer(settings).run(keys)


if __name__ == "__main__":
    run: Callable[[TransformerSettings], Coroutine[Any, Any, None]] = serve
    if len(sys.argv) == 3:
        run = partial(serve_worker, page=int(sys.argv.pop()))
        end_with_parent(int(sys.argv.pop()))
    run_service("transformer", TransformerSettings, run)
