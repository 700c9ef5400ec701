"""The export's formats of what a real stack has recorded."""

import asyncio
import json
import uuid

from headrace_logger.export import export
from tests.system.calls import rest
from tests.system.payload_log import records

MAX_TOKENS = 60


async def exported(stack, file_format, folder):
    """The lines of an export of the stack's log, which its logger has open."""
    output = folder / file_format
    database = stack.settings.run_folder / "payloads.sqlite3"
    arguments = ("--format", file_format, "--database", str(database), "--output", str(output))
    assert await asyncio.to_thread(export.main, arguments) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


async def test_a_chat_that_ended_is_an_example_a_row_and_a_line_of_a_trace(stack, tmp_path):
    gateway = stack.settings.gateway
    messages = [{"role": "user", "content": f"Tell me a story about a fox. {uuid.uuid4()}"}]
    body = {"model": "storyteller", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    whole = (await rest(gateway, "POST", "/v1/chat/completions", body | {"ignore_eos": True})).json
    # A stop string that the same answer has.
    stop = whole["choices"][0]["message"]["content"][40:44]
    ended = (await rest(gateway, "POST", "/v1/chat/completions", body | {"stop": [stop]})).json
    answer = ended["choices"][0]["message"]["content"]
    assert ended["choices"][0]["finish_reason"] == "stop"
    await records(gateway, 2, text_contains=messages[0]["content"])

    examples = [line for line in await exported(stack, "chat", tmp_path) if line.get("messages", [])[:1] == messages]
    # The first answer was cut off.
    assert examples == [{"messages": [*messages, {"role": "assistant", "content": answer}]}]
    rows = [line for line in await exported(stack, "guidellm", tmp_path) if line["messages"] == messages]
    counts = [(used["prompt_tokens"], used["completion_tokens"]) for used in (whole["usage"], ended["usage"])]
    assert [(row["prompt_tokens_count"], row["output_tokens_count"]) for row in rows] == counts
    trace = await exported(stack, "mooncake", tmp_path)
    assert [(line["input_length"], line["output_length"]) for line in trace[-2:]] == counts
    assert trace[-1]["hash_ids"] == trace[-2]["hash_ids"]
