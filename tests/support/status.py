"""The error with which a gRPC call fails."""

from collections.abc import Awaitable
from typing import Any

import grpc
import pytest


async def refusal(call: Awaitable[Any], match: str | None = None) -> grpc.aio.AioRpcError:
    """The error of a call, which must fail."""
    with pytest.raises(grpc.aio.AioRpcError, match=match) as raised:
        await call
    return raised.value


async def code_of(call: Awaitable[Any]) -> grpc.StatusCode:
    """The code of a call, which must fail."""
    return (await refusal(call)).code()
