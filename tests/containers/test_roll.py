"""deploy/compose/roll.sh replaces predictor, transformer, logger and Envoy under load: no call fails."""

import asyncio
import subprocess

from tests.containers.calls import KINDS, load
from tests.containers.stack import FILES, ROOT

ROLLED = ("predictor", "transformer", "logger")


def roll(stack, **settings):
    files = [part for file in FILES for part in ("--file", file)]
    return subprocess.run(
        [ROOT / "deploy/compose/roll.sh", "--project-directory", str(ROOT), *files],
        cwd=ROOT,
        env=stack.environment | settings,
        capture_output=True,
        text=True,
        timeout=600,
    )


async def test_a_roll_under_load_fails_no_call_and_applies_the_present_settings(stack):
    before = {service: stack.container(service).id for service in ROLLED}
    async with load(stack.gateway, KINDS, callers=2) as seen:
        with stack.timed("deploy/compose/roll.sh"):
            rolled = await asyncio.to_thread(
                roll, stack, PREDICTOR_LOG_LEVEL="DEBUG", TRANSFORMER_DRAIN_S="6", LOGGER_LOG_LEVEL="DEBUG"
            )
    assert rolled.returncode == 0, rolled.stdout + rolled.stderr
    assert not seen.errors(*KINDS), [(o.kind.name, o.error) for o in seen.errors(*KINDS)]
    print(f"{len(seen.outcomes)} calls, no error")
    for service, setting in zip(
        ROLLED, ("PREDICTOR_LOG_LEVEL=DEBUG", "TRANSFORMER_DRAIN_S=6", "LOGGER_LOG_LEVEL=DEBUG"), strict=True
    ):
        container = stack.container(service)
        assert container.id != before[service]
        assert setting in container.facts["Config"]["Env"]
    assert "reloaded: a new Envoy takes the calls" in stack.compose("logs", "--no-color", "envoy")


async def test_a_successor_that_does_not_start_leaves_the_stack_unchanged(stack):
    before = {service: stack.container(service).id for service in ROLLED}
    async with load(stack.gateway, KINDS) as seen:
        rolled = await asyncio.to_thread(roll, stack, PREDICTOR_LOG_LEVEL="LOUD")
    assert rolled.returncode == 1
    assert "the containers before it go on" in rolled.stderr
    assert {service: stack.container(service).id for service in ROLLED} == before
    assert not seen.errors(*KINDS)
