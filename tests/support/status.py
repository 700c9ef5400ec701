"""The status with which a gRPC call fails."""

from collections.abc import Awaitable
from typing import Any

import grpc
import pytest


async def code_of(call: Awaitable[Any]) -> grpc.StatusCode:
    """The code of a call, which must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()
