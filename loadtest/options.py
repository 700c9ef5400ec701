"""The options of the load test: fields of Locust's form, and command-line options of the same names.

All values are texts, because Locust keeps the type of a field's default value; `parse` makes `Options` of them or
raises ValueError, which names the field.

An objective is what a request must keep to, to count as good, written as in "TTFT <= 300 ms, gap <= 50 ms": measures
with their greatest value, in ms or s. `TTFT` is the time to the first token, `gap` the longest time between two
messages of the stream, `whole` the whole request, `cancel` how long the server worked on after a cancel. A measure that
a request does not have, such as the gap of a tensor call, is kept. A request that failed is never good.
"""

import math
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.prompts import Workload, parse_lengths, read_prompts

MEASURES = ("ttft", "gap", "whole", "cancel")
_TERM = re.compile(r"\s*(?P<measure>[a-z]+)\s*(<=|≤|<)\s*(?P<value>\d+(\.\d+)?)\s*(?P<unit>ms|s)\s*", re.IGNORECASE)
_MILLISECONDS = {"ms": 1.0, "s": 1000.0}

AUTOMATIC = "automatic"
REPLAY = "log"
_LEAST_SHARE, _GREATEST_KILLS = 50.0, 600.0

# Field → default and help, those that matter most first: the form shows them so. `model` is a menu where the page knows
# the stack's models.
_FIELDS = {
    "model": (AUTOMATIC, "automatic: the first that fits"),
    "output_tokens": ("16-64", "N or N-M"),
    "prompt_words": ("", "N or N-M; empty: examples"),
    "think_time": ("0.1-0.5", "seconds, N or N-M"),
    "arrivals": ("", "requests/s of each user, or log; empty: think time"),
    "objective": ("TTFT <= 1 s, gap <= 200 ms", "TTFT, gap, whole, cancel"),
    "good_percent": ("95", "requests that must meet it"),
    "deadline": ("60", "seconds"),
    "kills_per_minute": ("0", "predictors; DEVELOPMENT=true"),
    "prompts_file": ("", "JSON Lines or ShareGPT"),
    "tensor_shape": ("1,16", "where the model leaves it open"),
    "knee_seconds": ("20", "of each level of KneeShape"),
    "knee_most": ("512", "users of KneeShape"),
    "knee_precision": ("5", "per cent, of KneeShape"),
}


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
            raise ValueError(
                f"objective: {term.strip()!r} is not like 'TTFT <= 300 ms' ({', '.join(MEASURES)}; ms or s)"
            )
        limits[measure] = float(match["value"]) * _MILLISECONDS[match["unit"].lower()]
    return Objective(limits)


@dataclass(frozen=True)
class Options:
    """Times in seconds, shares 0 to 1, also `knee_precision`.

    `arrivals_per_s`: of each user, None for closed load; `replay`: arrivals of the payload log.
    """

    model: str
    workload: Workload
    tensor_shape: tuple[int, ...]
    think_s: tuple[float, float]
    arrivals_per_s: float | None
    replay: bool
    objective: Objective
    good_share: float
    deadline_s: float
    kills_per_minute: float
    knee_seconds: int
    knee_most: int
    knee_precision: float
    key: str


def add_fields(parser: Any, models: Sequence[str]) -> None:
    """Adds the options to Locust's parser; `models` are the choices of the form's menu, if the stack was asked."""
    for name, (default, text) in _FIELDS.items():
        choices = {"choices": [AUTOMATIC, *models]} if name == "model" and models else {}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=text, **choices)
    key = "of the gateway; empty: HEADRACE_KEY"
    parser.add_argument("--key", default="", is_secret=True, help=key)
    addresses = {
        "links": "The gateway's address in the report's links, if the browser needs another than --host",
        "knee_folder": "Where the knee's reports are written",
    }
    for name, default in (("links", ""), ("knee_folder", ".run/knee")):
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=default, include_in_web_ui=False, help=addresses[name]
        )
    parser.add_argument(
        "--check",
        action="store_true",
        include_in_web_ui=False,
        help="End with exit code 1 unless --good-percent of the requests met the objective",
    )


def parse(values: Namespace) -> Options:
    """The options; raises ValueError for a malformed one."""
    arrivals = values.arrivals.strip()
    file = values.prompts_file.strip()
    return Options(
        model="" if values.model in ("", AUTOMATIC) else values.model,
        workload=Workload(
            output=parse_lengths("output tokens", values.output_tokens),
            words=parse_lengths("prompt words", values.prompt_words) if values.prompt_words.strip() else None,
            prompts=read_prompts(Path(file)) if file else (),
        ),
        tensor_shape=_shape(values.tensor_shape),
        think_s=_think_time(values.think_time),
        arrivals_per_s=_number("arrivals", arrivals, above=0.0) if arrivals not in ("", REPLAY) else None,
        replay=arrivals == REPLAY,
        objective=parse_objective(values.objective),
        good_share=_number("good percent", values.good_percent, above=_LEAST_SHARE, most=100.0) / 100,
        deadline_s=_number("deadline", values.deadline, above=0.0),
        kills_per_minute=_number("kills per minute", values.kills_per_minute, most=_GREATEST_KILLS),
        knee_seconds=round(_number("knee seconds", values.knee_seconds, above=1.0, most=3600.0)),
        knee_most=round(_number("knee most", values.knee_most, above=0.5, most=100_000.0)),
        knee_precision=_number("knee precision", values.knee_precision, most=50.0) / 100,
        key=values.key.strip(),
    )


def _number(name: str, text: str, above: float = -1.0, most: float = math.inf) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not a number") from None
    if not math.isfinite(number) or number <= above or number < 0 or number > most:
        raise ValueError(f"{name}: {text!r} is not between {max(above, 0):g} and {most:g}")
    return number


def _think_time(text: str) -> tuple[float, float]:
    least, dash, greatest = text.strip().partition("-")
    bounds = _number("think time", least), _number("think time", greatest if dash else least)
    if bounds[0] > bounds[1]:
        raise ValueError(f"think time: {text!r} ends before it begins")
    return bounds


def _shape(text: str) -> tuple[int, ...]:
    read: Callable[[str], int] = int
    try:
        shape = tuple(read(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(f"tensor shape: {text!r} is not like 1,16")
    return shape
