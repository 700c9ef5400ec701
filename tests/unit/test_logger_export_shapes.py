"""The export's formats: the published shapes, and which records have none."""

import json

import pytest

from headrace_logger.export import shapes
from headrace_logger.export.shapes import Trace, dataset_row, example
from headrace_protos import headrace_pb2 as pb
from tests.unit.test_replay import record as logged

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "où?"}]


def record(**changes):
    """A recorded answer of three tokens, without the whole text that a redacted one has; None leaves a field out."""
    chunks = [pb.PayloadChunk(text=" upon", token_ids=[1]), pb.PayloadChunk(text=" a time", token_ids=[2, 3])]
    usage = pb.Usage(prompt_tokens=2, completion_tokens=3)
    return logged(**{"chunks": chunks, "text": None, "usage": usage, "parameters": None} | changes)


def chat(**changes):
    return record(**{"prompt": json.dumps(MESSAGES), "prompt_kind": "messages"} | changes)


# ---------------------------------------------------------------- chat


def test_a_chat_is_its_messages_with_the_answer_as_the_last():
    assert example(chat()) == {"messages": [*MESSAGES, {"role": "assistant", "content": " upon a time"}]}


def test_a_text_is_a_prompt_with_its_completion():
    assert example(record()) == {"prompt": "Once", "completion": " upon a time"}


def test_a_chat_with_tools_is_no_example():
    called = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    assert example(chat(parameters='{"tools": []}')) == shapes.TOOLS
    assert example(chat(prompt=json.dumps(called))) == shapes.TOOLS
    assert isinstance(example(chat(parameters='{"seed": 1}')), dict)


def test_the_text_of_the_record_is_the_answer_where_it_differs_from_its_chunks():
    assert example(record(text=" upon a")) == {"prompt": "Once", "completion": " upon a"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_id": "replay-019a0000-0000-7000-8000-000000000001"}, shapes.REPLAY),
        ({"sampling": "", "chunks": [], "engine_ms": None}, shapes.NOT_A_GENERATION),
        ({"incomplete": True}, shapes.INCOMPLETE),
        ({"status": "CANCELLED", "finish_reason": ""}, "status CANCELLED"),
        ({"status": ""}, "status unknown"),
        ({"finish_reason": "length"}, shapes.AT_MAX_TOKENS),
        # Redaction removes the ids of an answer up to the last match, and those of a prompt.
        ({"chunks": [pb.PayloadChunk(text="[card]"), pb.PayloadChunk(text=".", token_ids=[3])]}, shapes.NO_ANSWER),
        ({"chunks": [], "usage": pb.Usage(completion_tokens=3)}, shapes.NO_ANSWER),
        ({"prompt_ids": []}, shapes.NO_PROMPT),
        ({"prompt": ""}, shapes.NO_PROMPT),
        ({"prompt": "[5, 6]", "prompt_kind": "ids"}, shapes.NO_TEXT),
        ({"prompt": "[{", "prompt_kind": "messages"}, shapes.NO_PROMPT),
        ({"prompt": '[{"role": "user"}]', "prompt_kind": "messages"}, shapes.NO_PROMPT),
        ({"prompt": "a" * (shapes.WHOLE_TEXT + 1)}, shapes.CUT_PROMPT),
    ],
)
def test_a_record_without_a_whole_answer_is_no_example(changes, reason):
    assert example(record(**changes)) == reason


# ---------------------------------------------------------------- mooncake


def arrival(ms, token_ids, **changes):
    arrived = record(prompt_ids=token_ids, **changes)
    arrived.time.FromMilliseconds(1_780_000_000_000 + ms)
    return arrived


def lines(*records):
    trace = Trace()
    return [trace.line(one) for one in records]


def test_a_line_has_the_four_fields_of_the_published_traces_and_nothing_else():
    assert lines(arrival(7, range(513)), arrival(3059, range(600))) == [
        {"timestamp": 0, "input_length": 513, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 3052, "input_length": 600, "output_length": 3, "hash_ids": [0, 2]},
    ]


def test_equal_prefixes_share_ids_to_the_first_different_block():
    a, b, c = ([number] * 512 for number in (1, 2, 3))
    traced = lines(arrival(0, a + b), arrival(1, a + b + c), arrival(2, a + c + b), arrival(3, c + b), arrival(4, a))
    # The same block after another prefix has an id of its own.
    assert [line["hash_ids"] for line in traced] == [[0, 1], [0, 1, 2], [0, 3, 4], [5, 6], [0]]


def test_every_512_tokens_begun_have_an_id():
    lengths = [1, 511, 512, 513, 1024, 1025]
    traced = lines(*(arrival(0, [7] * length) for length in lengths))
    assert [len(line["hash_ids"]) for line in traced] == [1, 1, 1, 2, 2, 3]


def test_the_block_at_the_end_of_a_prompt_is_not_the_longer_block_that_begins_with_it():
    assert [line["hash_ids"] for line in lines(arrival(0, [1, 2]), arrival(1, [1, 2, 3]), arrival(2, [1, 2]))] == [
        [0],
        [1],
        [0],
    ]


def test_models_have_ids_of_their_own():
    traced = lines(arrival(0, [1]), arrival(1, [1], model="other"), arrival(2, [1], served_model="other"))
    assert [line["hash_ids"] for line in traced] == [[0], [1], [1]]


def test_an_answer_that_ended_early_counts_with_the_tokens_that_it_had():
    (line,) = lines(arrival(0, [1], status="CANCELLED", finish_reason="", usage=None))
    assert line["output_length"] == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_id": "replay-019a0000-0000-7000-8000-000000000001"}, shapes.REPLAY),
        ({"sampling": "", "chunks": [], "engine_ms": None}, shapes.NOT_A_GENERATION),
        ({"incomplete": True}, shapes.INCOMPLETE),
        ({"prompt_ids": []}, shapes.NO_PROMPT),
        ({"chunks": [], "usage": None, "status": "UNAVAILABLE"}, shapes.NO_TOKENS),
    ],
)
def test_what_was_no_load_is_in_no_trace_and_no_dataset(changes, reason):
    assert Trace().line(record(**changes)) == reason
    assert dataset_row(record(**changes)) == reason


def test_a_trace_begins_with_its_first_line():
    assert lines(arrival(0, []), arrival(5, [1]), arrival(6, [1]))[1:] == [
        {"timestamp": 0, "input_length": 1, "output_length": 3, "hash_ids": [0]},
        {"timestamp": 1, "input_length": 1, "output_length": 3, "hash_ids": [0]},
    ]


# ---------------------------------------------------------------- guidellm


def test_a_text_or_a_chat_is_a_row_with_its_counts():
    counts = {"prompt_tokens_count": 2, "output_tokens_count": 3}
    assert dataset_row(record()) == {"prompt": "Once", "messages": [{"role": "user", "content": "Once"}], **counts}
    assert dataset_row(chat()) == {"prompt": "Be brief.\noù?", "messages": MESSAGES, **counts}


def test_prompts_without_text_are_no_rows():
    assert dataset_row(record(prompt="[5, 6]", prompt_kind="ids")) == shapes.NO_TEXT
    assert Trace().line(record(prompt="[5, 6]", prompt_kind="ids"))["input_length"] == 2
