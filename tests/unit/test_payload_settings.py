"""The settings of the payload log are read from the environment; a wrong one is refused at the start, in one line."""

import json
import sys

import pytest

from headrace.errors import StartupError
from headrace.payload.rules import Digest, Mode
from headrace.settings import load
from headrace_protos.headrace_pb2 import PayloadRecord
from headrace_transformer.settings import TransformerSettings


@pytest.fixture
def settings(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["transformer"])
    monkeypatch.delenv("MODELS", raising=False)

    def read(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(f"TRANSFORMER_PAYLOAD_{name}", value)
        return load(TransformerSettings, "headrace_transformer")

    return read


def test_everything_is_recorded_by_default(settings):
    rules = settings().payload_rules
    assert (rules.mode("any", "r"), rules.redactions, rules.metadata, rules.tensor_bytes, rules.tensor_digest) == (
        Mode.ALL,
        (),
        frozenset(),
        0,
        Digest.OFF,
    )


def test_the_environment_sets_what_is_recorded(settings):
    read = settings(
        LOG="all,storyteller=metadata,later=off",
        SAMPLE="0.5",
        REDACT=json.dumps([{"pattern": "secret"}]),
        METADATA="X-User",
        TENSOR_BYTES="4KiB",
        TENSOR_DIGEST="blake2b",
    )
    rules = read.payload_rules
    assert (rules.models, rules.sample) == ({"storyteller": Mode.METADATA, "later": Mode.OFF}, 0.5)
    assert (rules.metadata, rules.tensor_bytes, rules.tensor_digest) == ({"x-user"}, 4096, Digest.BLAKE2B)
    record = PayloadRecord(prompt="a secret")
    rules.redact(record)
    assert record.prompt == "a [redacted]"
    # It may be loaded later, so the start goes on.
    assert read.unknown_logged_models == ["later"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LOG", "some", "'some' is no mode; there are all, request, response, metadata, off"),
        ("SAMPLE", "2", "must be at most 1"),
        ("REDACT", '[{"pattern": "("}]', "rule 1: '(' is no pattern of RE2: missing )"),
        ("REDACT", "nowhere.json", "neither a JSON list nor a file"),
        ("METADATA", "x-user,authorization", "authorization is a secret"),
        ("TENSOR_BYTES", "1TiB", "must be at most"),
        ("TENSOR_DIGEST", "md5", "must be off, blake2b or sha256"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(settings, name, value, text):
    with pytest.raises(StartupError) as caught:
        settings(**{name: value})
    assert str(caught.value).startswith(f"TRANSFORMER_PAYLOAD_{name}={value}: ")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
