"""Anthropic's Messages API through the gateway, with Anthropic's own client; its errors are in test_error_table.py."""

from tests.system.own_clients import client_passes


async def test_anthropics_own_client_works(stack):
    await client_passes("anthropic_client", stack.gateway)
