"""Checks a running stack from outside: every endpoint that a model should answer, and those it must refuse.

Metadata and configuration define the kind of model: text generation with or without chat template, encoder-decoder,
embeddings, classification, a user's tensors, a processor. Prints a table; exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import grpc
import httpx2

from headrace.errors import StartupError
from headrace_runner import settings
from headrace_runner.smoke.checks import checks_of
from headrace_runner.smoke.gateway import Check, Failed, Gateway, describe, ready_models
from headrace_runner.terminal import one_line

_CHECK_TIMEOUT_S = 120.0
_SHOWN = 110  # Characters of a check's result.
_BROKEN = (grpc.aio.AioRpcError, httpx2.HTTPError, TimeoutError, KeyError, IndexError, TypeError, ValueError)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make smoke", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="the model's name; without one, every model that is ready")
    parser.add_argument(
        "--gateway", default="", help="host:port of the gateway; without one, that of GATEWAY_BIND and GATEWAY_PORT"
    )
    arguments = parser.parse_args()
    try:
        address = arguments.gateway or settings.load().gateway
        failed = asyncio.run(smoke(address, arguments.model))
    except (StartupError, Failed) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None
    if failed:
        raise SystemExit(1)


async def smoke(address: str, name: str = "") -> int:
    """Runs and prints the checks of one model, or of all; returns the number of failures."""
    gateway = Gateway(address)
    try:
        names = [name] if name else await ready_models(gateway, address)
        if not names:
            raise Failed(f"no model is ready at {address}")
        return sum([await _smoke_one(gateway, each) for each in names])
    finally:
        await gateway.close()


async def _smoke_one(gateway: Gateway, name: str) -> int:
    model = await describe(gateway, name)
    print(f"{name}: {model.kind}{model.details}")
    checks = list(checks_of(gateway, model))
    failed = await _run(checks)
    print(f"{name}: {len(checks) - failed} of {len(checks)} pass\n", flush=True)
    return failed


async def _run(checks: Sequence[Check]) -> int:
    width = max(len(check.name) for check in checks)
    failed = 0
    for check in checks:
        error = ""
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                found = await check.run()
        except Failed as failure:
            error = str(failure)
        except _BROKEN as broken:
            error = f"{type(broken).__name__}: {broken}"
        failed += bool(error)
        shown = error or one_line(found, _SHOWN)
        print(f"  {'FAIL' if error else 'pass'}  {check.protocol:<9}  {check.name:<{width}}  {shown}", flush=True)
    return failed


if __name__ == "__main__":
    main()
