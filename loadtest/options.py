"""The options of the load test: fields of Locust's form, and command-line options of the same names.

All values are texts, because Locust keeps the type of a field's default value; `parse` makes `Options` of them or
raises ValueError, which names the field.

An objective is what a request must keep to, to count as good, written as in "TTFT <= 300 ms, gap <= 50 ms": measures
with their greatest value, in ms or s. `TTFT` is the time to the first token, `gap` the longest time between two
messages of the stream, `whole` the whole request, `cancel` how long the server worked on after a cancel. A measure that
a request does not have, such as the gap of a tensor call, is kept. A request that failed is never good.
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, FiniteFloat, PositiveInt, ValidationError

from headrace.validation import first_fault
from loadtest.prompts import MAX_LENGTH, Prompt, Workload, read_prompts

MEASURES = ("ttft", "gap", "whole", "cancel")
_TERM = re.compile(r"\s*(?P<measure>[a-z]+)\s*(<=|≤|<)\s*(?P<value>\d+(\.\d+)?)\s*(?P<unit>ms|s)\s*", re.IGNORECASE)
_MILLISECONDS = {"ms": 1.0, "s": 1000.0}

AUTOMATIC = "automatic"
REPLAY: Literal["log"] = "log"


@dataclass(frozen=True)
class Objective:
    """Greatest values in milliseconds, by measure."""

    limits: Mapping[str, float]

    def met(self, values: Mapping[str, float | None]) -> bool:
        """Whether the values of a request (milliseconds, None where it has none) keep to every limit."""
        return all((value := values.get(measure)) is None or value <= limit for measure, limit in self.limits.items())

    def __str__(self) -> str:
        names = {"ttft": "TTFT"}
        return ", ".join(f"{names.get(measure, measure)} <= {limit:g} ms" for measure, limit in self.limits.items())


def parse_objective(text: str) -> Objective:
    """The objective of a text; of an empty one, which every request that succeeds meets. Raises ValueError."""
    limits: dict[str, float] = {}
    for term in text.split(",") if text.strip() else ():
        match = _TERM.fullmatch(term)
        if match is None or (measure := match["measure"].lower()) not in MEASURES:
            raise ValueError(f"is not like 'TTFT <= 300 ms, gap <= 1 s' ({', '.join(MEASURES)}; ms or s)")
        limits[measure] = float(match["value"]) * _MILLISECONDS[match["unit"].lower()]
    return Objective(limits)


def _bounds(text: str) -> tuple[str, str]:
    """The bounds of N-M; of N, which is both."""
    least, dash, greatest = text.partition("-")
    return least, greatest if dash else least


def _ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError("ends before it begins")
    return bounds


_OR_NONE = BeforeValidator(lambda text: text or None)
_Model = Annotated[str, AfterValidator(lambda name: "" if name == AUTOMATIC else name)]
_Arrivals = Annotated[Annotated[FiniteFloat, Field(gt=0)] | Literal["log"] | None, _OR_NONE]
_Length = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
_Lengths = Annotated[tuple[_Length, _Length], BeforeValidator(_bounds), AfterValidator(_ascending)]
_Seconds = Annotated[FiniteFloat, Field(ge=0)]
_Pause = Annotated[tuple[_Seconds, _Seconds], BeforeValidator(_bounds), AfterValidator(_ascending)]
_Shape = Annotated[tuple[PositiveInt, ...], BeforeValidator(lambda text: text.replace("x", ",").split(","))]
_Prompts = Annotated[tuple[Prompt, ...], BeforeValidator(lambda text: read_prompts(Path(text)) if text else ())]


def _field(default: str, description: str, **bounds: Any) -> Any:
    return Field(default, description=description, **bounds)


class Options(BaseModel):
    """Those that matter most first: the form shows them so. `arrivals` are of each user a second, None for closed load.

    `model` is a menu where the page knows the stack's models.
    """

    model_config = {"frozen": True, "validate_default": True}

    model: _Model = _field(AUTOMATIC, "automatic: the first that fits")
    output_tokens: _Lengths = _field("16-64", "N or N-M")
    prompt_words: Annotated[_Lengths | None, _OR_NONE] = _field("", "N or N-M; empty: examples")
    think_time: _Pause = _field("0.1-0.5", "seconds, N or N-M")
    arrivals: _Arrivals = _field("", "requests/s of each user, or log; empty: think time")
    objective: Annotated[Objective, BeforeValidator(parse_objective)] = _field(
        "TTFT <= 1 s, gap <= 200 ms", "TTFT, gap, whole, cancel"
    )
    good_percent: float = _field("95", "requests that must meet it", gt=50, le=100)
    deadline: FiniteFloat = _field("60", "seconds", gt=0)
    kills_per_minute: float = _field("0", "predictors; DEVELOPMENT=true", ge=0, le=600)
    prompts_file: _Prompts = _field("", "JSON Lines or ShareGPT")
    tensor_shape: _Shape = _field("1,16", "where the model leaves it open")
    knee_seconds: int = _field("20", "of each level of KneeShape", ge=2, le=3600)
    knee_most: int = _field("512", "users of KneeShape", ge=1, le=100_000)
    knee_precision: float = _field("5", "per cent, of KneeShape", ge=0, le=50)
    key: str = _field("", "of the gateway; empty: HEADRACE_KEY")

    @cached_property
    def workload(self) -> Workload:
        return Workload(self.output_tokens, self.prompt_words, self.prompts_file)


def add_fields(parser: Any, models: Sequence[str]) -> None:
    """Adds the options to Locust's parser; `models` are the choices of the form's menu, if the stack was asked."""
    for name, field in Options.model_fields.items():
        more: dict[str, Any] = {"choices": [AUTOMATIC, *models]} if name == "model" and models else {}
        if name == "key":
            more["is_secret"] = True
        parser.add_argument(_option(name), default=field.default, help=field.description, **more)
    addresses = {
        "links": "The gateway's address in the report's links, if the browser needs another than --host",
        "knee_folder": "Where the knee's reports are written",
    }
    for name, default in (("links", ""), ("knee_folder", ".run/knee")):
        parser.add_argument(_option(name), default=default, include_in_web_ui=False, help=addresses[name])
    parser.add_argument(
        "--check",
        action="store_true",
        include_in_web_ui=False,
        help="End with exit code 1 unless --good-percent of the requests met the objective",
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse(values: Namespace) -> Options:
    """The options; raises ValueError for a malformed one."""
    texts = {name: getattr(values, name).strip() for name in Options.model_fields}
    try:
        return Options.model_validate(texts)
    except ValidationError as error:
        (name, *_), message = first_fault(error)
        raise ValueError(f"{str(name).replace('_', ' ')}: {texts[str(name)]!r} {message}") from None
