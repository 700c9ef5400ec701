"""The name and policy of a caller, as the gateway passes them on."""

import pytest

from headrace.clients import ANYONE, CLIENT, POLICY, Client, Policy, caller_of, client_of
from headrace.errors import UnauthenticatedError


def test_without_a_name_a_call_may_do_everything():
    assert client_of([("te", "trailers"), (POLICY, '{"role":"user"}')]) is ANYONE
    assert ANYONE.is_admin
    ANYONE.check_model("any")


def test_a_name_alone_is_a_user_without_limits():
    assert client_of([(CLIENT, "alice")]) == Client("alice", Policy())


@pytest.mark.parametrize("policy", ["{", '{"role":"king"}', '{"weight":0}', '{"streams":0}', '{"wieght":1}', "[]"])
def test_a_policy_that_cannot_be_read_allows_nothing(policy):
    with pytest.raises(UnauthenticatedError, match="the policy of the client alice"):
        client_of([(CLIENT, "alice"), (POLICY, policy)])


@pytest.mark.parametrize(
    ("metadata", "caller"),
    [
        ([], ""),
        ([("x-forwarded-for", "192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "192.0.2.7"), (CLIENT, "alice")], "alice"),
        ([("x-forwarded-for", "alice, 10.0.0.1,192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "forged"), ("x-forwarded-for", "192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "2001:db8::1:2:3:4")], "2001:db8::/64"),
        ([("x-forwarded-for", "::ffff:192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "not:an:address")], "not:an:address"),
    ],
)
def test_callers_are_distinguished_by_name_or_by_the_address_that_the_gateway_saw(metadata, caller):
    assert caller_of(metadata) == caller
