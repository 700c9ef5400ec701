"""The operator's key file, and the gateway's view of it."""

import hashlib
import json

import pytest

from headrace.clients import POLICY, Policy, client_of
from headrace.errors import StartupError
from headrace_runner.command.access import LIMITS, add_key
from headrace_transformer.keys import digests, parse_keys

KEY = "hr-0123456789abcdef"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def test_an_entry_has_a_digest_and_a_policy():
    (entry,) = parse_keys(f"- {{name: alice, sha256: {DIGEST}, models: [a, b], weight: 2, streams: 3}}")
    assert entry.policy == Policy(models=frozenset({"a", "b"}), weight=2, streams=3)
    digest, name, role, rest = digests([entry]).removesuffix("\n").split("\t")
    assert (digest, name, role) == (DIGEST, "alice", "user")
    assert client_of([("x-headrace-client", name), (POLICY, f'{{"role":"{role}",{rest}}}')]).policy == entry.policy
    assert json.loads(f"{{{rest}}}").keys() == {"models", "weight", "streams"}


def test_a_policy_is_a_header_that_every_hop_takes():
    (entry,) = parse_keys(f'[{{name: a, key: {KEY}, models: ["modèle", "\\x7f\\u2028"]}}]')
    rest = digests([entry]).removesuffix("\n").split("\t")[3]
    assert all(" " <= letter <= "~" for letter in rest)
    assert client_of([("x-headrace-client", "a"), (POLICY, f"{{{rest}}}")]).policy == entry.policy


def test_the_gateway_gets_only_the_digest_of_a_key():
    entries = parse_keys(f"[{{name: root, key: {KEY}, role: admin}}]")
    assert digests(entries) == f"{DIGEST}\troot\tadmin\t\n"
    assert KEY not in repr(entries)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- {name: a", "is not YAML, line 1"),
        ("", "is not a list"),
        ("{a: 1}", "is not a list"),
        ("[1]", "entry 1: "),
        ("[{name: a}]", r"entry 1 \(a\): needs one of key and sha256"),
        (f"[{{name: a, key: {KEY}, sha256: {DIGEST}}}]", "needs one of"),
        (
            "[{name: a, key: short}]",
            r"entry 1 \(a\): key: must have 16 to 512 printable .*; `make key NAME=…` makes one",
        ),
        ("[{name: a, key: 'with space in the middle'}]", "key: "),
        (f"[{{name: a, sha256: {DIGEST[1:]}}}]", "sha256: "),
        (f"[{{name: a, sha256: {DIGEST.upper()}}}]", "sha256: "),
        (f'[{{name: "a\\tb", key: {KEY}}}]', "name: "),
        (f"[{{name: a, key: {KEY}, role: king}}]", "role: "),
        (f"[{{name: a, key: {KEY}, wieght: 1}}]", "wieght: "),
        (f"[{{name: a, key: {KEY}, streams: 0}}]", "streams: "),
        (
            f"[{{name: a, key: {KEY}, models: {[f'model-of-a-team-{number}' for number in range(2201)]}}}]",
            r"entry 1 \(a\): its policy has \d+ bytes, a call carries at most 8192",
        ),
        (f"[{{name: a, key: {KEY}}}, {{name: b, key: {KEY}}}]", "a and b have the same key"),
        (f"[{{name: a, key: {KEY}}}, {{name: a, key: {KEY}1, streams: 1}}]", "the entries of a differ"),
    ],
)
def test_a_fault_is_named_in_one_line_without_the_key(text, fault):
    with pytest.raises(ValueError, match=fault) as error:
        parse_keys(text)
    assert "\n" not in str(error.value)
    assert KEY not in str(error.value)


def test_a_made_key_has_the_limits_that_were_given(tmp_path):
    file = tmp_path / "keys.yaml"
    given = {"role": "admin", "models": ["a"], **dict.fromkeys(LIMITS, "7")}
    keys = [add_key(file, "alice", given), add_key(file, "alice", {}), add_key(file, "123", {})]
    entries = parse_keys(file.read_text())
    assert [entry.digest for entry in entries] == [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    assert [entry.name for entry in entries] == ["alice", "alice", "123"]
    assert entries[0].policy == entries[1].policy == Policy.model_validate(given)
    assert set(given) == set(Policy.model_fields)
    assert entries[2].policy == Policy()


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        ("", {"streams": "0"}, "streams=0: must be at least 1"),
        ("", {"weight": "much"}, "weight=much: must be a number"),
        (
            f"- {{name: alice, sha256: {DIGEST}, streams: 2}}\n",
            {"streams": "3"},
            "alice has a key with other limits in ",
        ),
        ("name: alice\n", {}, ".* is not a file of keys"),
        ("- {name: a", {}, ".* is not a file of keys"),
    ],
)
def test_limits_that_a_key_cannot_have_change_nothing(tmp_path, text, given, message):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(StartupError, match=f"^{message}"):
        add_key(file, "alice", given)
    assert file.read_text() == text
