"""Provides a model's files on the local disk: a folder as it is, a hub id by download into the hub's cache.

What a URL names lies in a cache of our own, see downloads.py.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import StartupError, StartupFault
from headrace.models.downloads import BEGINS_A_MODEL, PROGRESS_INTERVAL_S, fetch_listed
from headrace.models.downloads import Report as Report
from headrace.models.sources import GGUF_SUFFIX, ModelSource

if TYPE_CHECKING:
    from tqdm.asyncio import tqdm_asyncio

logger = logging.getLogger(__name__)

_MODEL_FILES = (*BEGINS_A_MODEL, "model.py")  # Any of these makes a folder a model.
_NO_TEXT = "mmproj"  # Begins the names of files for images.
_LATER_PART = re.compile(r"-(?!00001)[0-9]{5}-of-[0-9]{5}\.gguf$")


def fetch(source: ModelSource, patterns: Sequence[str], report: Report = lambda _: None) -> Path:
    """The folder that holds the source's files; only files that match `patterns` are downloaded.

    Logs and reports the progress of a download. Raises StartupError with what to do. Blocks, for minutes if much is
    downloaded.
    """
    if source.is_local:
        return _model_folder(source.name, Path(source.location))
    where = f"model {source.name}: {source.location}"

    reported = ""

    def show(text: str) -> None:
        nonlocal reported
        if text != reported:
            reported = text
            logger.info("%s: %s", where, text)
            report(text)

    if source.is_url:
        # Each needs packages that the other does without.
        if source.location.startswith("oci:"):
            from headrace.models.oci import resolve
        else:
            from headrace.models.buckets import resolve
        show("fetching")
        try:
            return _model_folder(
                source.name, fetch_listed(source.location, patterns, lambda: resolve(source.location), show)
            )
        except StartupError as error:
            raise type(error)(f"model {source.name}: {error}") from error
    # Its client takes a fifth of the transformer's start.
    from huggingface_hub import errors, snapshot_download

    show("fetching from the hub")
    repository, _, quantisation = source.location.partition(":")
    try:
        if quantisation:
            patterns = _files_of(repository, source.revision, quantisation)
        folder = Path(
            snapshot_download(
                repository,
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
    if quantisation:
        return _of_gguf(source.name, folder / min(patterns))
    if not (folder.is_dir() and any(folder.iterdir())):
        raise StartupError(
            f"{where} has no model's files; of a GGUF repository name a quantisation: {repository}:Q4_K_M"
        )
    return folder


def _model_folder(name: str, path: Path) -> Path:
    """The folder of a model at a path: this, or one made of the only GGUF file in it; raises StartupError."""
    if any((path / file).is_file() for file in _MODEL_FILES):
        return path
    files = [path] if path.is_file() else sorted(path.glob(f"*{GGUF_SUFFIX}"))
    files = [file for file in files if not file.name.startswith(_NO_TEXT) and not _LATER_PART.search(file.name)]
    if len(files) == 1:
        return _of_gguf(name, files[0])
    if files:
        raise StartupError(f"model {name}: {path} has several GGUF files; name one: {', '.join(map(str, files))}")
    raise StartupError(f"model {name}: {path} has no config.json, as save_pretrained writes it, and no model.py")


def _files_of(repository: str, revision: str | None, quantisation: str) -> list[str]:
    """The GGUF files of a quantisation in a repository; raises StartupError, and the hub's errors."""
    from huggingface_hub import constants, model_info, snapshot_download

    if constants.HF_HUB_OFFLINE:
        folder = Path(snapshot_download(repository, revision=revision))
        files = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF_SUFFIX}")]
    else:
        siblings = model_info(repository, revision=revision or "main").siblings or ()
        files = [file.rfilename for file in siblings if file.rfilename.endswith(GGUF_SUFFIX)]
    files = [name for name in files if not Path(name).name.startswith(_NO_TEXT)]
    wanted = re.compile(rf"(?i)(.*[-._/])?{re.escape(quantisation)}(-[0-9]{{5}}-of-[0-9]{{5}})?\{GGUF_SUFFIX}")
    found = [name for name in files if wanted.fullmatch(name)]
    if not found:
        raise StartupError(f"{repository} has no GGUF file of {quantisation}; it has {', '.join(files) or 'none'}")
    folders = {Path(name).parent for name in found}
    return [name for name in found if Path(name).parent == min(folders)]


def _of_gguf(name: str, path: Path) -> Path:
    from headrace.models.gguf.folder import gguf_folder

    try:
        return gguf_folder(path)
    except (ValueError, OSError) as error:
        raise StartupError(f"model {name}: {error}") from None


def _progress_shown_by(show: Report) -> type[tqdm_asyncio[Any]]:
    """The hub's progress bars as lines of text, for services have no terminal."""
    from tqdm.asyncio import tqdm_asyncio

    class Progress(tqdm_asyncio):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options |= {"mininterval": PROGRESS_INTERVAL_S, "file": io.StringIO()}
            super().__init__(*arguments, **options)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            # There is a progress bar of files too; bytes are more informative.
            if self.unit == "B" and self.n:
                show(f"fetched {self.n / 1e6:.1f} of {(self.total or self.n) / 1e6:.1f} MB")

    return Progress
