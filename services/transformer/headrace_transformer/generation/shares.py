"""On whose account a request's work is where clients compete for a busy engine: its caller's, the client of its key or
without keys the address that the gateway saw.

Batches are below their clients: each client's have an account of their own with the lowest weight, apart from those of
other clients, for an account is also whose prefixes are shared.
"""

from __future__ import annotations

from functools import lru_cache

from headrace.clients import Client, Policy, account
from headrace.rpc.server.call_context import CallContext

_LOWEST_WEIGHT = 0.001


def account_of(call: CallContext) -> Client:
    """The account of a call: that of its client or of its client's batches."""
    if call.is_background:
        return _batches_of(call.client.name)
    return account(call.client, call.metadata)


@lru_cache(maxsize=1024)
def _batches_of(client: str) -> Client:
    # No client of a key can have such a name.
    return Client(f"~batches {client}", Policy(weight=_LOWEST_WEIGHT))
