"""Which parts of a request are recorded: modes, sampling, allowed metadata and redaction."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.payload.redaction import REDACTED, parse_redactions
from headrace.payload.rules import Mode, PayloadRules, parse_metadata, parse_modes
from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord, PayloadTensor

CARD = "4111111111111111"
CARDS = {"pattern": r"\b\d{16}\b", "replace": "[card]"}


def rules(*given, **others):
    return PayloadRules(redactions=parse_redactions(json.dumps(given)), **others)


def redacted(record, *given):
    rules(*given).redact(record)
    return record


def answer(*texts, **fields):
    chunks = [PayloadChunk(text=text, token_ids=[number], logprobs=[-1.0]) for number, text in enumerate(texts)]
    return PayloadRecord(chunks=chunks, **fields)


def texts(record):
    return [chunk.text for chunk in record.chunks]


def ids(record):
    return [list(chunk.token_ids) for chunk in record.chunks]


# ---------------------------------------------------------------- modes and sampling


def test_modes_apply_to_all_models_or_to_single_ones():
    modes = parse_modes(" request, storyteller=metadata ,normalizer=off")
    assert modes == PayloadRules(Mode.REQUEST, {"storyteller": Mode.METADATA, "normalizer": Mode.OFF})
    assert parse_modes(str(modes)) == modes
    assert parse_modes("a=off") == PayloadRules(Mode.ALL, {"a": Mode.OFF})
    assert [modes.mode(model, "r") for model in ("storyteller", "other")] == [Mode.METADATA, Mode.REQUEST]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("everything", "'everything' is no mode; there are all, request, response, metadata, off"),
        ("a=", "'' is no mode"),
        ("=off", "'=off' names no model"),
        ("all,off", "two modes for all models, all and off"),
        ("a=off,a=all", "two modes for the model 'a'"),
    ],
)
def test_malformed_modes_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_modes(text)


def test_every_process_takes_the_same_sample_of_the_right_size():
    names = [f"request-{number}" for number in range(4000)]
    tenth = {name for name in names if PayloadRules(sample=0.1).mode("m", name) is Mode.ALL}
    half = {name for name in names if PayloadRules(sample=0.5, default=Mode.REQUEST).mode("n", name) is Mode.REQUEST}
    assert tenth <= half
    assert 0.07 < len(tenth) / len(names) < 0.13
    # Fixed numbers: another process, and a later version, must choose the same requests.
    assert sorted(tenth)[:3] == ["request-1017", "request-1025", "request-103"]
    assert not any(PayloadRules(sample=0.0).mode("m", name) is Mode.ALL for name in names)
    assert PayloadRules(sample=0.5).mode("m", "half \ud800 a pair") in Mode


def test_the_metadata_of_a_named_clients_requests_is_kept_outside_the_sample_too():
    rules = PayloadRules(sample=0.0, models={"off": Mode.OFF})
    assert rules.mode("m", "r", "ann") is Mode.METADATA
    assert rules.mode("m", "r") is Mode.OFF
    assert rules.mode("off", "r", "ann") is Mode.OFF


def test_only_allowed_metadata_is_recorded_and_never_a_secret():
    assert parse_metadata("X-User, x-tenant") == {"x-user", "x-tenant"}
    assert parse_metadata("") == frozenset()
    for name in ("Authorization", "cookie", "x-api-key", "proxy-authorization"):
        with pytest.raises(ValueError, match="secret"):
            parse_metadata(f"x-user,{name}")
    with pytest.raises(ValueError, match="no name of a header"):
        parse_metadata("x user")
    with pytest.raises(ValueError, match="binary"):
        parse_metadata("x-trace-bin")


# ---------------------------------------------------------------- patterns


def test_a_pattern_covers_every_text_of_a_record():
    parameters = {"user": CARD, "list": [{"deep": f"a {CARD}"}], "seed": 7}
    record = PayloadRecord(
        prompt=f"pay with {CARD}!",
        text=f"paid with {CARD}",
        message=f"{CARD} failed",
        parameters=json.dumps(parameters),
        metadata={"x-user": CARD},
        model="m",
        trace_id=CARD,
    )
    redacted(record, CARDS)
    assert (record.prompt, record.text, record.message) == ("pay with [card]!", "paid with [card]", "[card] failed")
    assert json.loads(record.parameters) == {"user": "[card]", "list": [{"deep": "a [card]"}], "seed": 7}
    assert dict(record.metadata) == {"x-user": "[card]"}
    assert (record.model, record.trace_id) == ("m", CARD)


def test_a_match_may_span_chunks_and_its_place_is_where_it_begins():
    record = answer("Your card ", "is 4111", "1111", "11111111", " and", " more")
    redacted(record, CARDS)
    assert texts(record) == ["Your card ", "is [card]", "", "", " and", " more"]
    # Ids run ahead of their text: only those after the match spell none of it.
    assert ids(record) == [[], [], [], [], [4], [5]]
    assert [len(chunk.logprobs) for chunk in record.chunks] == [0, 0, 0, 0, 1, 1]


def test_an_answer_without_a_match_is_unchanged():
    record = answer("Your card ", "is secret")
    before = record.SerializeToString(deterministic=True)
    assert redacted(record, CARDS).SerializeToString(deterministic=True) == before


@given(st.lists(st.sampled_from(["", "a", "x", "xx", "b x", "xé", "😀", "yx"]), max_size=12))
def test_chunks_redacted_are_their_joined_text_redacted(pieces):
    record = redacted(answer(*pieces), {"pattern": "x+[ay]?", "replace": "-"})
    whole = redacted(PayloadRecord(message="".join(pieces)), {"pattern": "x+[ay]?", "replace": "-"}).message
    assert "".join(texts(record)) == whole
    assert len(record.chunks) == len(pieces)


def test_each_rule_sees_the_result_of_the_rules_before_it():
    record = redacted(answer("ab", "cd"), {"pattern": "bc", "replace": "X"}, {"pattern": "aX", "replace": "Y"})
    assert texts(record) == ["Y", "d"]


def test_a_conversation_is_searched_without_its_escapes():
    messages = [{"role": "user", "content": f"Mine:\n{CARD}\n"}]
    record = redacted(PayloadRecord(prompt=json.dumps(messages)), CARDS)
    assert json.loads(record.prompt) == [{"role": "user", "content": "Mine:\n[card]\n"}]


def test_a_pattern_removes_the_token_ids_of_a_prompt():
    assert redacted(PayloadRecord(prompt="[5, 6, 7]"), CARDS).prompt == REDACTED
    mixed = redacted(PayloadRecord(prompt='["a", [5, 6]]'), CARDS)
    assert json.loads(mixed.prompt) == ["a", REDACTED]
    assert redacted(PayloadRecord(prompt="[5, 6, 7]"), {"path": "$.message", "pattern": "x"}).prompt == "[5, 6, 7]"


@pytest.mark.parametrize("prompt", [f"[{CARD}", f'["\\ud800 {CARD}"]', f'{{"a": "{CARD}"}}', "[" * 9000 + CARD])
def test_a_prompt_that_only_looks_like_json_is_searched_as_text(prompt):
    assert CARD not in redacted(PayloadRecord(prompt=prompt), CARDS).prompt


@pytest.mark.parametrize("parameters", ['{"user": "4111', "[" * 9000])
def test_malformed_parameters_are_removed(parameters):
    for rule in (CARDS, {"path": "$.parameters.user"}):
        assert redacted(PayloadRecord(parameters=parameters), rule).parameters == json.dumps(REDACTED)


# ---------------------------------------------------------------- paths


def test_a_string_at_a_path_is_redacted_and_anything_else_is_null():
    given = {"user": "Ann", "chat_template_kwargs": {"age": 7, "user": ["Ann"]}, "top_p": 1}
    record = PayloadRecord(parameters=json.dumps(given))
    redacted(
        record,
        {"path": "$.parameters.user"},
        {"path": "$.parameters.chat_template_kwargs.user"},
        {"path": "$.parameters.chat_template_kwargs.age"},
    )
    assert json.loads(record.parameters) == {
        "user": REDACTED,
        "chat_template_kwargs": {"age": None, "user": None},
        "top_p": 1,
    }


def test_a_path_to_the_answer_redacts_its_chunks_too():
    record = redacted(answer("", "Once", " upon", text="Once upon"), {"path": "$.text"})
    assert (record.text, texts(record), ids(record)) == (REDACTED, ["", REDACTED, ""], [[], [], []])


def test_a_path_with_a_pattern_changes_nothing_else():
    record = PayloadRecord(prompt=f"a {CARD}", message=CARD, metadata={"x": CARD, "y": CARD})
    redacted(record, {"path": "$.prompt", **CARDS}, {"path": "$.metadata.x", **CARDS})
    assert (record.prompt, record.message, dict(record.metadata)) == ("a [card]", CARD, {"x": "[card]", "y": CARD})


def test_metadata_is_removed_by_name_or_whole():
    record = PayloadRecord(metadata={"x-user": "Ann", "x-tenant": "t"})
    assert dict(redacted(record, {"path": "$.metadata.x-user"}).metadata) == {"x-user": REDACTED, "x-tenant": "t"}
    assert not redacted(record, {"path": "$.metadata"}).metadata


def test_only_the_contents_of_tensors_are_removed():
    def tensor():
        return PayloadTensor(name="image", datatype="UINT8", shape=[2], digest="sha256:0", data=b"ab")

    record = PayloadRecord(inputs=[tensor()], outputs=[tensor()], chunks=[PayloadChunk(outputs=[tensor()])])
    record.inputs[0].size = record.outputs[0].size = 2
    redacted(record, {"path": "$.inputs.data"}, {"path": "$.outputs.digest"}, {"path": "$.outputs.size"})
    (kept,) = record.inputs
    assert (kept.name, list(kept.shape), kept.digest, kept.HasField("data")) == ("image", [2], "sha256:0", False)
    assert (kept.size, record.outputs[0].HasField("size")) == (2, False)
    assert (record.outputs[0].digest, record.outputs[0].data) == (REDACTED, b"ab")
    assert record.chunks[0].outputs[0].digest == REDACTED
    redacted(record, {"path": "$.inputs.shape"}, {"path": "$.outputs"})
    assert (list(record.inputs[0].shape), len(record.outputs), len(record.chunks[0].outputs)) == ([], 0, 0)


def test_a_path_without_a_match_changes_nothing():
    record = PayloadRecord(parameters='{"a": 1}', metadata={"x": "y"}, inputs=[PayloadTensor(name="i")])
    before = record.SerializeToString(deterministic=True)
    redacted(record, {"path": "$.parameters.b"}, {"path": "$.metadata.z"}, {"path": "$.inputs.contents"})
    assert record.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("rule", "touches"),
    [
        (CARDS, True),
        ({"path": "$.text"}, True),
        ({"path": "$.prompt"}, False),
        ({"path": "$.outputs.data"}, False),
        ({"path": "$.parameters.user", "pattern": "a"}, False),
    ],
)
def test_rules_know_whether_they_need_whole_answers(rule, touches):
    assert rules(rule).redacts_answers is touches
    assert not PayloadRules().redacts_answers


# ---------------------------------------------------------------- rules that are refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not JSON"),
        ("/nowhere/rules.json", "neither a JSON list nor a file"),
        ('[{"pattern": "a"}, {}]', "rule 2: has neither a path nor a pattern"),
        ('[{"path": "$.prompt", "replace": "x"}]', "rule 1: replace needs a pattern"),
        ('[{"pattern": "a", "patern": "b"}]', "rule 1: patern: unknown field"),
        ('[{"pattern": 5}]', "rule 1: pattern"),
        ('["prompt"]', "rule 1"),
        ('[{"pattern": "("}]', r"rule 1: '\(' is no pattern of RE2: missing \)"),
        (r'[{"pattern": "(a)\\1"}]', "is no pattern of RE2: invalid escape"),
        ('[{"pattern": "a*"}]', "matches where there is no text"),
        ('[{"path": "$.["}]', "is no path: write"),
        ('[{"path": "prompt"}]', r"is no path: write \$"),
        ('[{"path": "$"}]', "is no path"),
        ('[{"path": "$.*"}]', "is no path"),
        ('[{"path": "$..user"}]', "is no path"),
        ('[{"path": "$.parameters..user"}]', "is no path"),
        ('[{"path": "$.inputs[0].data"}]', "is no path"),
        ('[{"path": "$.record_id"}]', "must begin with"),
        ('[{"path": "$.prompts"}]', "one of prompt, text"),
        ('[{"path": "$.prompt.role"}]', r"goes into a text; give \$.prompt and a pattern"),
        ('[{"path": "$.inputs.data", "pattern": "a"}]', "without a pattern"),
    ],
)
def test_a_wrong_rule_is_refused_and_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_redactions(text)


def test_rules_can_be_in_a_file(tmp_path):
    file = tmp_path / "rules.json"
    file.write_text(json.dumps([CARDS]))
    (rule,) = parse_redactions(str(file))
    record = PayloadRecord(prompt=CARD)
    rule.redact(record)
    assert record.prompt == "[card]"
    file.write_text("{}")
    with pytest.raises(ValueError, match="must be a JSON list"):
        parse_redactions(str(file))
