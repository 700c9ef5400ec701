"""A request of a batch comes after those that somebody waits for: the engine gets it with the lowest weight."""

import orjson
import pytest

from headrace.clients import CLIENT
from headrace.rpc.server.call_context import BACKGROUND
from tests.support.scripted_predictor import MODEL, ScriptedPredictor, serving
from tests.support.transformer_fixtures import transformer


@pytest.mark.parametrize("client", ["", "alice"])
async def test_the_engine_knows_what_belongs_to_a_batch(client):
    predictor = ScriptedPredictor()
    named = [(CLIENT, client)] if client else []
    body = orjson.dumps({"model": MODEL, "prompt": "Tell me", "max_tokens": 3})
    async with serving(predictor) as address, transformer(address, f"{MODEL}=models/storyteller") as (stub, _):
        for headers in (named, [*named, (BACKGROUND, "batch_1")]):
            assert (await stub.openai("Completions", body, headers)).status == 200
    interactive, background = [call.request for call in predictor.calls]
    assert (interactive.client, interactive.weight) == (client, 1.0)
    # An account of its own for each client, for an account is also whose cached prefixes are shared.
    assert (background.client, background.weight) == (f"~batches {client}", 0.001)
