"""Two stacks on one machine differ in one setting, PORT_OFFSET, and have nothing in common."""

from __future__ import annotations

from pathlib import Path

import httpx2

from headrace_runner.settings import StackSettings
from headrace_runner.stack import Stack
from tests.support.free_ports import free_offset
from tests.system.payload_log import records

TIMEOUT_S = 60


def stack_of(folder: Path) -> Stack:
    models = "storyteller=models/storyteller"
    return Stack(StackSettings(port_offset=free_offset(), run_folder=folder, models=models, device="cpu"))


async def test_two_stacks_serve_side_by_side(tmp_path: Path) -> None:
    async with stack_of(tmp_path / "a") as first, stack_of(tmp_path / "b") as second:
        ports = [{number for numbers in one.settings.ports().values() for number in numbers} for one in (first, second)]
        assert not ports[0] & ports[1]
        prompts = {first: "Tell me of a fox.", second: "Tell me of an owl."}
        for stack, prompt in prompts.items():
            async with httpx2.AsyncClient(base_url=f"http://{stack.gateway}", timeout=TIMEOUT_S) as client:
                body = {"model": "storyteller", "prompt": prompt, "max_tokens": 3}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
        for stack, prompt in prompts.items():
            assert [record.prompt for record in await records(stack.gateway)] == [prompt]
