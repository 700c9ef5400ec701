"""Which models may be loaded by name, and from where.

In this order: the models of `MODELS`; a sub-folder of `PREDICTOR_MODEL_REPOSITORY`, under its own name; a hub id or a
URL that matches `PREDICTOR_HUB_ALLOW`. A model of the hub is loaded under its id, or under any other name with the id,
and optionally a revision, as `source`; a URL is always a `source`. Text from callers is never used as a path.
"""

from __future__ import annotations

from headrace.errors import ForbiddenError, InvalidRequestError, NotFoundError
from headrace.models.sources import ModelSource, is_name, parse_hub_id, parse_remote
from headrace.models.urls import matches
from headrace_predictor.settings import PredictorSettings


class ModelLocations:
    """Reads the disk, briefly; has no state but the settings."""

    def __init__(self, settings: PredictorSettings) -> None:
        self._configured = {source.name: source for source in settings.models}
        self._folder = settings.model_repository
        self._patterns = settings.hub_allow

    def find(self, name: str, source: str = "") -> ModelSource:
        """The source of a model; raises InvalidRequestError, NotFoundError or ForbiddenError."""
        local = self._local(name)
        if local is not None:
            if source not in ("", local.where):
                raise InvalidRequestError(f"model {name!r} has a source of its own; load {source!r} by another name")
            return local
        if not source and is_name(name) and not self._allowed(name):
            raise NotFoundError(f"no model {name!r}")
        try:
            if source and not is_name(name):
                raise ValueError(f"{name!r} is not a name for a model")
            remote = parse_remote(name, source) if source else parse_hub_id(name, name)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        if not self._allowed(remote.location):
            what = remote.location if remote.is_url else f"hub id {remote.location!r}"
            raise ForbiddenError(f"{what} may not be loaded; add it to PREDICTOR_HUB_ALLOW to allow that")
        return remote

    def names(self) -> list[str]:
        """The models in the repository folder that can be loaded."""
        if self._folder is None:
            return []
        try:
            return sorted(path.name for path in self._folder.iterdir() if is_name(path.name) and path.is_dir())
        except OSError:
            return []  # The folder is missing for now; loaded models are still served.

    def _local(self, name: str) -> ModelSource | None:
        if name in self._configured:
            return self._configured[name]
        if self._folder is not None and is_name(name) and (self._folder / name).is_dir():
            return ModelSource(name, str(self._folder / name))
        return None

    def _allowed(self, location: str) -> bool:
        return any(matches(location, pattern) for pattern in self._patterns)
