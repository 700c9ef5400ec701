"""A record as an example for fine-tuning and evaluation; pure.

The shape is that of OpenAI's fine-tuning files, `{"messages": [{"role", "content"}, …]}` with the answer as the last
message (platform.openai.com/docs/guides/supervised-fine-tuning). A text prompt is `{"prompt", "completion"}`, the shape
of OpenAI's completion models, which TRL reads too (huggingface.co/docs/trl/dataset_formats).

Only whole answers that ended by themselves are examples: not those that redaction has changed, and not those that end
at `max_tokens`, which would teach a model to stop anywhere. Nor are chats with tools, whose answers are on record in
the model's own format.
"""

from __future__ import annotations

from typing import Any

from headrace.payload.records import answer_of
from headrace_logger.export.generations import TOOLS, answered_whole, has_tools, messages_of
from headrace_protos.headrace_pb2 import PayloadRecord


def example(record: PayloadRecord) -> dict[str, Any] | str:
    """The example, or the reason why the record is none."""
    if reason := answered_whole(record):
        return reason
    if has_tools(record):
        return TOOLS
    answer = answer_of(record)
    if (messages := messages_of(record)) is None:
        return {"prompt": record.prompt, "completion": answer}
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}
