"""Errors of loading a model, in one line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import StartupError

logger = logging.getLogger(__name__)


@contextmanager
def as_startup_error(model: str) -> Iterator[None]:
    """Converts any error to a StartupError: damaged files raise errors of many types, and a retry helps with none."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        logger.debug("model %s cannot be loaded", model, exc_info=True)
        text = str(error).strip() or type(error).__name__
        raise StartupError(f"model {model} cannot be loaded: {text.splitlines()[0]}") from None
