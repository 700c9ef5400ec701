"""Provides a model's files on the local disk: a folder as it is, a hub id by download into the hub's cache.

What a URL names lies in a cache of our own, see downloads.py.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import StartupError, StartupFault
from headrace.models import buckets, oci
from headrace.models.downloads import Report as Report
from headrace.models.downloads import fetch_listed
from headrace.models.sources import ModelSource

if TYPE_CHECKING:
    from tqdm.asyncio import tqdm_asyncio

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 2.0
_MODEL_FILES = (
    "config.json",
    "model.py",
    "modules.json",
    "adapter_config.json",
)  # Any of these makes a folder a model.


def fetch(source: ModelSource, patterns: Sequence[str], report: Report = lambda _: None) -> Path:
    """The folder that holds the source's files; only files that match `patterns` are downloaded.

    Logs and reports the progress of a download. Raises StartupError with what to do. Blocks, for minutes if much is
    downloaded.
    """
    if source.is_local:
        folder = Path(source.location)
        if not any((folder / name).is_file() for name in _MODEL_FILES):
            raise StartupError(
                f"model {source.name}: {folder} has no config.json, as save_pretrained writes it, and no model.py"
            )
        return folder
    where = f"model {source.name}: {source.location}"

    reported = ""

    def show(text: str) -> None:
        nonlocal reported
        if text != reported:
            reported = text
            logger.info("%s: %s", where, text)
            report(text)

    if source.is_url:
        resolve = oci.resolve if source.location.startswith("oci:") else buckets.resolve
        show("fetching")
        try:
            return fetch_listed(source.location, patterns, lambda: resolve(source.location), show)
        except StartupError as error:
            raise type(error)(f"model {source.name}: {error}") from error
    # Its client takes a fifth of the transformer's start.
    from huggingface_hub import errors, snapshot_download

    show("fetching from the hub")
    try:
        return Path(
            snapshot_download(
                source.location,
                revision=source.revision,
                allow_patterns=list(patterns),
                tqdm_class=_progress_shown_by(show),
            )
        )
    except errors.GatedRepoError:
        raise StartupError(f"{where} is gated: accept its licence on the hub and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise StartupError(f"{where} has no revision {source.revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise StartupError(f"{where} is neither a folder nor on the hub; a private one needs HF_TOKEN") from None
    except errors.HFValidationError:
        raise StartupError(f"{where} is neither a folder nor a hub id") from None
    except OSError:
        raise StartupFault(
            f"{where}: the hub cannot be reached; check the network or name a local folder"
            "; containers reach it with MODELS_NETWORK=outer"
        ) from None


def _progress_shown_by(show: Report) -> type[tqdm_asyncio[Any]]:
    """The hub's progress bars as lines of text, for services have no terminal."""
    from tqdm.asyncio import tqdm_asyncio

    class Progress(tqdm_asyncio):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options |= {"mininterval": _PROGRESS_INTERVAL_S, "file": io.StringIO()}
            super().__init__(*arguments, **options)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            # There is a progress bar of files too; bytes are more informative.
            if self.unit == "B" and self.n:
                show(f"fetched {self.n / 1e6:.1f} of {(self.total or self.n) / 1e6:.1f} MB")

    return Progress
