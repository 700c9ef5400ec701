"""Checks a running stack from outside: every endpoint that a model should answer, and those it must refuse.

Metadata and configuration define the kind of model: text generation with or without chat template, encoder-decoder,
embeddings, classification, a user's tensors, a processor.
"""

from collections.abc import Sequence
from contextlib import closing

import grpc
import httpx2

from headrace_runner.smoke.checks import checks_of
from headrace_runner.smoke.gateway import Check, Failed, Gateway, describe
from headrace_runner.terminal import one_line

_SHOWN = 110  # Characters of a check's result.
_BROKEN = (grpc.RpcError, httpx2.HTTPError, KeyError, IndexError, TypeError, ValueError)


def smoke(address: str, name: str = "") -> int:
    """Runs and prints the checks of one model, or of all; returns the number of failures; raises StartupError."""
    with closing(Gateway(address)) as gateway:
        names = [name] if name else gateway.ready_models()
        if not names:
            raise Failed(f"no model is ready at {address}")
        return sum([_smoke_one(gateway, each) for each in names])


def _smoke_one(gateway: Gateway, name: str) -> int:
    model = describe(gateway, name)
    print(f"{name}: {model.kind}{model.details}")
    checks = list(checks_of(gateway, model))
    failed = _run(checks)
    print(f"{name}: {len(checks) - failed} of {len(checks)} pass\n", flush=True)
    return failed


def _run(checks: Sequence[Check]) -> int:
    width = max(len(check.name) for check in checks)
    failed = 0
    for check in checks:
        error = ""
        try:
            found = check.run()
        except Failed as failure:
            error = str(failure)
        except _BROKEN as broken:
            error = f"{type(broken).__name__}: {broken}"
        failed += bool(error)
        shown = error or one_line(found, _SHOWN)
        print(f"  {'FAIL' if error else 'pass'}  {check.protocol:<9}  {check.name:<{width}}  {shown}", flush=True)
    return failed
