"""On whose account a request's work is where clients compete for a busy engine: its caller's, the client of its key or
without keys the address that the gateway saw.

Shadow copies and batches are below their clients: they have accounts of their own, with the lowest weight. Those of
batches are apart by client, for an account is also whose prefixes are shared.
"""

from __future__ import annotations

from functools import lru_cache

from headrace.clients import Client, Policy, account
from headrace.rpc.call_context import CallContext

LOWEST_WEIGHT = 0.001
_SHADOWS = Client("~shadows", Policy(weight=LOWEST_WEIGHT))  # No client of a key can have such a name.


def account_of(call: CallContext) -> Client:
    """The account of a call: that of its client, shadow copies or batches."""
    if call.shadow_of:
        return _SHADOWS
    if call.is_background:
        return _batches_of(call.client.name)
    return account(call.client, call.metadata)


@lru_cache(maxsize=1024)
def _batches_of(client: str) -> Client:
    return Client(f"~batches {client}", Policy(weight=LOWEST_WEIGHT))
