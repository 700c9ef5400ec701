"""A record as a row of a guidellm dataset; pure.

The columns are the default names of guidellm 0.8's column mapper (guidellm/data/preprocessors/mappers.py): `prompt` for
/v1/completions, `messages` for /v1/chat/completions, `prompt_tokens_count`, and `output_tokens_count`, the number of
tokens that guidellm requests. Every row has both forms of the prompt, because the reader takes the columns' types from
the first rows: a text is one message of the user, as guidellm itself would send it, and of a chat `prompt` is the
contents of its messages, a line each.
"""

from __future__ import annotations

from typing import Any

from headrace_logger.export.generations import messages_of, output_tokens, sent_text
from headrace_protos.headrace_pb2 import PayloadRecord


def dataset_row(record: PayloadRecord) -> dict[str, Any] | str:
    """The row, or the reason why the record is none."""
    if reason := sent_text(record):
        return reason
    messages = messages_of(record)
    return {
        "prompt": record.prompt if messages is None else "\n".join(message["content"] for message in messages),
        "messages": [{"role": "user", "content": record.prompt}] if messages is None else messages,
        "prompt_tokens_count": len(record.prompt_ids),
        "output_tokens_count": output_tokens(record),
    }
