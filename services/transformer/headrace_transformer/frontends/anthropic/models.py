"""The models that generate text, as Anthropic's API lists them; all of them are one page.

Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def model_info(card: Mapping[str, Any]) -> dict[str, Any]:
    """A model by its card in OpenAI's API."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def model_list(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    data = [model_info(card) for card in cards if card["kind"] == "generation"]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
