"""The folder of files and batches. Several processes may share it; every method may block.

    .lock                          held for changes that others must see whole
    unfinished/BATCH CLIENT        for each batch that is not final; who runs it holds its flock
    client-CLIENT/files/ID.json    a file's description; ID.jsonl, its contents, is there first
    client-CLIENT/batches/ID.json  a batch's state; ID.cancel, beside it, requests its cancellation

A client sees what is its own, an admin all. Without keys there is one client, whose name is empty.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic import ValidationError

from headrace.clients import NAME_PATTERN, Client
from headrace.errors import InvalidRequestError, OverloadedError
from headrace_transformer.batches.durable import (
    FileLock,
    locked,
    older,
    refusing_when_full,
    size_of,
    sync_folder,
    write_durably,
)
from headrace_transformer.batches.objects import Batch, NoSuchObjectError, StoredFile, checked_id, new_id

MAX_FILES = 10_000  # Of one client.
MAX_BATCHES = 10_000
_DAY_S = 86_400
_PREFIX = "client-"
_UNREADABLE = FileNotFoundError, ValidationError  # Removed meanwhile, or of another version.


class Limits(NamedTuple):
    """What the folder holds: bytes of files, unfinished batches of each client, days after which results go."""

    max_bytes: int
    batches_per_client: int
    days: int


class Store:
    """See the module. Raises HeadraceError; OSError where a disk fails."""

    def __init__(self, folder: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._limits = limits
        self._clock = clock
        self._lock = folder / ".lock"
        self._unfinished = folder / "unfinished"

    # ------------------------------------------------------------------ files

    def add_file(self, client: Client, filename: str, purpose: str, contents: bytes) -> StoredFile:
        """Keeps a file; raises OverloadedError where the folder is full."""
        folder = self._own(client.name) / "files"
        file_id = new_id("file-")
        path = folder / f"{file_id}.jsonl"
        with refusing_when_full():
            folder.mkdir(parents=True, exist_ok=True)
            self._check_room(client, folder, len(contents))
            write_durably(path, contents)
            try:
                with locked(self._lock):
                    self._check_room(client, folder, 0)  # Others may have added files meanwhile.
                    return self._describe(folder, file_id, filename, purpose, len(contents))
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def file(self, client: Client, file_id: str) -> StoredFile:
        return StoredFile.model_validate_json(self._described(client, file_id).read_bytes())

    def files(self, client: Client, purpose: str, after: str, limit: int, newest_first: bool) -> list[StoredFile]:
        """The client's files after one, one more than `limit`, so that it is known whether there are more."""
        found: list[StoredFile] = []
        for path in self._listed(client, "files", after, newest_first):
            try:
                file = StoredFile.model_validate_json(path.read_bytes())
            except _UNREADABLE:
                continue
            if purpose in ("", file.purpose):
                found.append(file)
            if len(found) > limit:
                break
        return found

    def open_file(self, client: Client, file_id: str) -> BinaryIO:
        """The contents of a file."""
        try:
            return self._described(client, file_id).with_suffix(".jsonl").open("rb")
        except FileNotFoundError:
            raise _no_file(file_id) from None

    def delete_file(self, client: Client, file_id: str) -> None:
        """Deletes a file; raises InvalidRequestError if an unfinished batch needs it."""
        with locked(self._lock):
            path = self._described(client, file_id)
            for batch in self._unfinished_of(path.parents[1].name.removeprefix(_PREFIX)):
                if batch.input_file_id == file_id:
                    raise InvalidRequestError(f"the batch {batch.id} needs the file; cancel the batch first")
            self._remove_file(path)

    # ------------------------------------------------------------------ batches

    def create_batch(self, client: Client, batch: Batch) -> None:
        """Adds a batch; raises NoSuchObjectError without its file, and OverloadedError beyond a limit."""
        folder = self._own(client.name) / "batches"
        folder.mkdir(parents=True, exist_ok=True)
        with refusing_when_full(), locked(self._lock):
            if self.file(client, batch.input_file_id).purpose != "batch":
                raise InvalidRequestError("the file's purpose must be batch", param="input_file_id")
            if not self.input(batch).exists():
                raise InvalidRequestError("the file is another client's", param="input_file_id")
            in_progress = sum(owner == client.name for _, owner in self.unfinished())
            if in_progress >= self._limits.batches_per_client:
                raise OverloadedError(f"{in_progress} batches are in progress, no more are allowed at once")
            if sum(1 for _ in folder.glob("batch_*.json")) >= MAX_BATCHES:
                raise OverloadedError(f"{MAX_BATCHES} batches are kept; the oldest go after {self._limits.days} days")
            with refusing_when_full():
                self._unfinished.mkdir(exist_ok=True)
                self._mark(batch).touch()
                self.save(batch)

    def batch(self, client: Client, batch_id: str) -> Batch:
        for folder in self._seen(client):
            try:
                return self._read(folder / "batches" / f"{checked_id(batch_id)}.json")
            except FileNotFoundError:
                continue
        raise NoSuchObjectError(f"there is no batch {batch_id!r}")

    def batches(self, client: Client, after: str, limit: int) -> list[Batch]:
        """The client's batches after one, the newest first, one more than `limit`."""
        found: list[Batch] = []
        for path in self._listed(client, "batches", after, newest_first=True):
            with suppress(*_UNREADABLE):
                found.append(self._read(path))
            if len(found) > limit:
                break
        return found

    def cancel(self, client: Client, batch_id: str) -> Batch:
        """Requests the cancellation of a batch; raises InvalidRequestError if it has ended."""
        with locked(self._lock):
            batch = self.batch(client, batch_id)
            if batch.is_final:
                raise InvalidRequestError(f"the batch is {batch.status}: it cannot be cancelled")
            self._state(batch).with_suffix(".cancel").touch()
        return self.batch(client, batch_id)

    # ------------------------------------------------------------------ for who runs batches

    def unfinished(self) -> list[tuple[str, str]]:
        """The batches that are not final, by id and client, the oldest first."""
        names = sorted(path.name for path in self._unfinished.glob("*"))
        return [(batch_id, client) for batch_id, _, client in (name.partition(" ") for name in names)]

    def take(self, batch_id: str, client: str) -> tuple[Batch, FileLock] | None:
        """An unfinished batch, and the lock with which this process runs it; None if another one does."""
        mark = self._unfinished / f"{batch_id} {client}"
        lock = FileLock.take(mark)
        if lock is None:
            return None
        try:
            with locked(self._lock):
                state = self._own(client) / "batches" / f"{batch_id}.json"
                batch = Batch.model_validate_json(state.read_bytes()) if state.exists() else None
                if batch is None or batch.is_final:  # Its process ended at the wrong moment.
                    mark.unlink(missing_ok=True)
                    batch = None
        except BaseException:
            lock.release()
            raise
        if batch is None:
            lock.release()
            return None
        return batch, lock

    def save(self, batch: Batch) -> None:
        """Replaces the state of a batch."""
        write_durably(self._state(batch), batch.model_dump_json().encode())

    def finish(self, batch: Batch) -> None:
        """Saves a batch that is final, and makes its results files of the client."""
        for file_id, count in ((batch.output_file_id, batch.completed), (batch.error_file_id, batch.failed)):
            contents = self.results(batch, file_id)
            if count:
                name = f"{batch.id}_{file_id.rpartition('-')[2]}.jsonl"
                self._describe(contents.parent, file_id, name, "batch_output", contents.stat().st_size)
        self.save(batch)
        self._mark(batch).unlink(missing_ok=True)
        self._state(batch).with_suffix(".cancel").unlink(missing_ok=True)

    def is_cancelled(self, batch: Batch) -> bool:
        return self._state(batch).with_suffix(".cancel").exists()

    def input(self, batch: Batch) -> Path:
        return self._own(batch.client) / "files" / f"{batch.input_file_id}.jsonl"

    def results(self, batch: Batch, file_id: str) -> Path:
        """The file of a batch's results, which its client sees once the batch is final."""
        return self._own(batch.client) / "files" / f"{file_id}.jsonl"

    def remove_old(self) -> None:
        """Removes files, and final batches, that are older than the days for which they are kept."""
        oldest = self._clock() - self._limits.days * _DAY_S
        with locked(self._lock):
            unfinished = {batch_id for batch_id, _ in self.unfinished()}
            needed = {
                file_id
                for batch in self._unfinished_of(None)
                for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            }
            for folder in self._folder.glob(f"{_PREFIX}*"):
                for path in older(folder.glob("batches/batch_*.json"), oldest):
                    if path.stem not in unfinished:
                        path.with_suffix(".cancel").unlink(missing_ok=True)
                        path.unlink()
                for path in older(folder.glob("files/file-*.json"), oldest):
                    if path.stem not in needed:
                        self._remove_file(path)
                # Of processes that ended while they wrote.
                for path in older(folder.glob("*/.*"), oldest):
                    path.unlink(missing_ok=True)
                for path in older(folder.glob("files/*.jsonl"), oldest):
                    if not path.with_suffix(".json").exists() and path.stem not in needed:
                        path.unlink()

    # ------------------------------------------------------------------

    def _own(self, client: str) -> Path:
        if client and not re.fullmatch(NAME_PATTERN, client):
            raise InvalidRequestError("the client's name is malformed")
        return self._folder / f"{_PREFIX}{client}"

    def _seen(self, client: Client) -> list[Path]:
        """The folders of the clients whose files and batches a client sees."""
        own = self._own(client.name)
        return [own, *(path for path in self._folder.glob(f"{_PREFIX}*") if path != own)] if client.is_admin else [own]

    def _listed(self, client: Client, kind: str, after: str, newest_first: bool) -> Iterator[Path]:
        """The descriptions of files or batches in the order of their ids, those after one."""
        paths = [path for folder in self._seen(client) for path in folder.glob(f"{kind}/[!.]*.json")]
        for path in sorted(paths, key=lambda path: path.stem, reverse=newest_first):
            if not after or (path.stem < after if newest_first else path.stem > after):
                yield path

    def _described(self, client: Client, file_id: str) -> Path:
        for folder in self._seen(client):
            path = folder / "files" / f"{checked_id(file_id)}.json"
            if path.exists():
                return path
        raise _no_file(file_id)

    def _describe(self, folder: Path, file_id: str, filename: str, purpose: str, size: int) -> StoredFile:
        now = int(self._clock())
        expires_at = now + self._limits.days * _DAY_S
        file = StoredFile(
            id=file_id, filename=filename, purpose=purpose, size=size, created_at=now, expires_at=expires_at
        )
        write_durably(folder / f"{file_id}.json", file.model_dump_json().encode())
        return file

    def _remove_file(self, description: Path) -> None:
        description.unlink(missing_ok=True)
        description.with_suffix(".jsonl").unlink(missing_ok=True)
        sync_folder(description.parent)

    def _check_room(self, client: Client, own: Path, size: int) -> None:
        """Refuses a file beyond the limits; a client with a key may have half of the folder's bytes."""
        most = self._limits.max_bytes
        sizes = {folder: size_of(folder) for folder in self._folder.glob(f"{_PREFIX}*/files")}
        if sum(sizes.values()) + size > most or (client.name and sizes.get(own, 0) + size > most // 2):
            raise OverloadedError("the folder of batches is full: delete files that are no longer needed")
        if sum(1 for _ in own.glob("file-*.json")) >= MAX_FILES:
            raise OverloadedError(f"there are {MAX_FILES} files: delete those that are no longer needed")

    def _unfinished_of(self, client: str | None) -> list[Batch]:
        """The unfinished batches of a client; None: of all."""
        found: list[Batch] = []
        for batch_id, owner in self.unfinished():
            state = self._own(owner) / "batches" / f"{batch_id}.json"
            if client in (None, owner):
                with suppress(*_UNREADABLE):
                    found.append(Batch.model_validate_json(state.read_bytes()))
        return found

    def _read(self, path: Path) -> Batch:
        """A batch as its client sees it."""
        batch = Batch.model_validate_json(path.read_bytes())
        try:
            requested_at = path.with_suffix(".cancel").stat().st_mtime
        except FileNotFoundError:
            return batch
        return batch if batch.is_final else batch.entered("cancelling", requested_at)

    def _state(self, batch: Batch) -> Path:
        return self._own(batch.client) / "batches" / f"{batch.id}.json"

    def _mark(self, batch: Batch) -> Path:
        return self._unfinished / f"{batch.id} {batch.client}"


def _no_file(file_id: str) -> NoSuchObjectError:
    return NoSuchObjectError(f"there is no file {file_id[:64]!r}")
