"""The route file: names that requests may use for a model, and the models that answer them.

The operator's file (TRANSFORMER_MODEL_ROUTES) is YAML, a mapping of names to routes: aliases, or splits by weight with
models to fall back to; docs/models.md shows some. A route may have a model's own name, which then means the route.

Where a model is named, `{model: NAME, version: "2"}` names one of its versions. A target is always a model, never
another route.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from headrace.files import load_yaml
from headrace.rpc.server.call_context import ServedModel
from headrace.validation import first_fault

MAX_ROUTES = 1000
_MAX_TARGETS = 16

Name = Annotated[str, Field(min_length=1, max_length=255)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Target(_Document):
    """A model, or one of its versions."""

    model: Name
    version: Annotated[str, Field(max_length=64, coerce_numbers_to_str=True)] = ""

    @property
    def served(self) -> ServedModel:
        return ServedModel(self.model, self.version)


class Weighted(Target):
    """One of several targets; a weight of 0 gets only the requests that name it."""

    weight: float = Field(1.0, ge=0, le=1_000_000, allow_inf_nan=False)


def _with_model(value: Any) -> Any:
    """A plain name is that of a model."""
    return {"model": value} if isinstance(value, str) else value


class Route(_Document):
    """Where requests for a name go."""

    split: tuple[Annotated[Weighted, BeforeValidator(_with_model)], ...] = Field(min_length=1, max_length=_MAX_TARGETS)
    fallback: tuple[Annotated[Target, BeforeValidator(_with_model)], ...] = Field((), max_length=_MAX_TARGETS)

    @model_validator(mode="before")
    @classmethod
    def _reads_alias(cls, value: Any) -> Any:
        """A route with one target may name it without a list."""
        if isinstance(value, dict) and "model" in value:
            if "split" in value:
                raise ValueError("has a model or a split, not both")
            alias = {name: value[name] for name in ("model", "version") if name in value}
            rest = {name: item for name, item in value.items() if name not in alias}
            return rest | {"split": [alias]}
        return value

    @model_validator(mode="after")
    def _has_weight(self) -> "Route":
        if not any(target.weight for target in self.split):
            raise ValueError("a split needs a weight above 0")
        return self

    @property
    def targets(self) -> list[ServedModel]:
        """All models that a request may choose by name, without repetition."""
        return list(dict.fromkeys(target.served for target in (*self.split, *self.fallback)))


Routes = Mapping[str, Route]
_ROUTES: TypeAdapter[dict[str, Route]] = TypeAdapter(Annotated[dict[Name, Route], Field(max_length=MAX_ROUTES)])


def parse_routes(text: str) -> Routes:
    """The routes of a file, by name; raises ValueError with one line that names the fault."""
    document = load_yaml(text)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ValueError("is not a mapping of names to routes such as chat: {model: storyteller}")
    try:
        return _ROUTES.validate_python(document)
    except ValidationError as error:
        place, message = first_fault(error)
        raise ValueError(": ".join((".".join(map(str, place)), message) if place else (message,))) from None
