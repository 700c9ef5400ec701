"""The file with the models whose calls need not pass the transformer.

The gateway sends their ModelInfer calls straight to a predictor (envoy/first_message.lua), which answers and records
them as the transformer would. The file has a name a line, and is replaced as a whole. Several transformers may share
it: all of them follow the same predictors.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from headrace.files import replace_file
from headrace_transformer.routing.router import Router

logger = logging.getLogger(__name__)

_RETRY_S = 10.0


async def list_direct_models(path: Path, router: Router) -> None:
    """Keeps the file equal to what the router knows, until cancelled."""
    written: list[str] | None = None
    while True:
        changed = router.changed
        names = sorted(router.direct_names)
        if names != written:
            try:
                await asyncio.to_thread(replace_file, path, "".join(f"{name}\n" for name in names))
                written = names
            except OSError as error:
                logger.warning("%s cannot be written, all calls go through the transformer: %s", path, error.strerror)
                await asyncio.sleep(_RETRY_S)
                continue
        await changed.wait()
