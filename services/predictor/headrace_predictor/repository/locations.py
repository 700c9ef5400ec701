"""Which models may be loaded by name, and from where.

In this order: the models of `MODELS`; a sub-folder of `PREDICTOR_MODEL_REPOSITORY`, under its own name; a hub id or a
URL that matches `PREDICTOR_HUB_ALLOW`. A sub-folder `org` that holds folders alone is no model: they are models
`org/name`. A model of the hub is loaded under its id, or under any other name with the id, and optionally a revision,
as `source`; a URL is always a `source`. Text from callers is never used as a path.
"""

from pathlib import Path

from headrace.errors import ForbiddenError, InvalidRequestError, NotFoundError
from headrace.models.sources import ModelSource, is_name, matches, parse_hub_id, parse_remote
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
        if not source and (not is_name(name) or (name.count("/") != 1 and not self._allowed(name))):
            raise NotFoundError(f"no model {name!r}")
        try:
            if not is_name(name):
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
        found: list[str] = []
        for name, is_folder in _visible(self._folder).items():
            inner = _visible(self._folder / name) if is_folder else {}
            if inner and all(inner.values()):
                found += filter(is_name, (f"{name}/{part}" for part in inner))
            elif is_folder:
                found.append(name)
        return sorted(found)

    def _local(self, name: str) -> ModelSource | None:
        if name in self._configured:
            return self._configured[name]
        if self._folder is not None and name in self.names():
            return ModelSource(name, str(self._folder / name))
        return None

    def _allowed(self, location: str) -> bool:
        return any(matches(location, pattern) for pattern in self._patterns)


def _visible(folder: Path) -> dict[str, bool]:
    """What a folder holds, except for hidden names, and whether each is a folder."""
    try:
        return {path.name: path.is_dir() for path in folder.iterdir() if is_name(path.name)}
    except OSError:
        return {}  # It is missing for now, or may not be read; loaded models are still served.
