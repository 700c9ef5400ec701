"""Brings a model's files to the local disk: a folder as it is, a hub id by download into the hub's cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from millrace.errors import StartupError
from millrace.model_sources import ModelSource

logger = logging.getLogger(__name__)


def fetch(source: ModelSource, patterns: Sequence[str]) -> Path:
    """The folder that holds the source's files; only files that match `patterns` are downloaded.

    Raises StartupError that says what to do. Blocks, for minutes where much is downloaded.
    """
    if source.is_local:
        folder = Path(source.location)
        if not (folder / "config.json").is_file():
            raise StartupError(f"model {source.name}: {folder} has no config.json; is it a folder of save_pretrained?")
        return folder
    where = f"model {source.name}: {source.location}"
    logger.info("%s: fetching from the hub", where)
    try:
        return Path(snapshot_download(source.location, revision=source.revision, allow_patterns=list(patterns)))
    except GatedRepoError:
        raise StartupError(f"{where} is gated: accept its licence on the hub and set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise StartupError(f"{where} has no revision {source.revision!r}") from None
    except RepositoryNotFoundError:
        raise StartupError(f"{where} is neither a folder nor on the hub; a private one needs HF_TOKEN") from None
    except OSError:
        raise StartupError(f"{where}: the hub cannot be reached; check the network or name a local folder") from None
