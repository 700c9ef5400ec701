"""A model of the hub is downloaded at the first start and served; safetensors alone are fetched."""

import re
from pathlib import Path

from tests.hub import serve_hub
from tests.system.calls import generate, text_of

ROOT = Path(__file__).parents[2]


async def test_a_hub_model_is_fetched_and_served(new_stack, tmp_path):
    with serve_hub({"somebody/story": ROOT / "models" / "storyteller"}) as hub:
        own = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
        stack = await new_stack(models="story=somebody/story@main", environment={"predictor": own, "transformer": own})
    assert text_of(await generate(stack.gateway, model="story", prompt="Once upon a time", max_tokens=5))
    assert re.search(r"somebody/story: fetched [\d.]+ of 3\.\d MB", stack.log("predictor-0"))
    fetched = {path.name for path in tmp_path.rglob("snapshots/*/*")}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= fetched
    assert "README.md" not in fetched
