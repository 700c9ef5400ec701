"""OpenAI's Batch API through the gateway."""

from __future__ import annotations

from tests.system.own_clients import client_passes


async def test_openais_own_client_runs_batches(new_stack):
    await client_passes("openai_batches", (await new_stack()).gateway)
