"""Arrivals as the payload log has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from loadtest.prompts import Prompt


def replayed(records: Iterable[Mapping[str, Any]]) -> list[tuple[float, Prompt]]:
    """Arrivals of records as REST gives them: seconds since the oldest, prompt and the answer's length."""
    asked = [record for record in records if record.get("prompt")]
    asked.sort(key=lambda record: record["time"])
    times = [datetime.fromisoformat(record["time"]).timestamp() for record in asked]
    return [
        (at - times[0], Prompt(record["prompt"], record.get("usage", {}).get("completion_tokens")))
        for at, record in zip(times, asked, strict=True)
    ]
