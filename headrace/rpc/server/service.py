"""How a service's `__main__` starts: logging, uvloop, telemetry, one-line start-up errors."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

import uvloop

from headrace.errors import StartupError
from headrace.processes import raise_descriptor_limit
from headrace.settings import ServiceSettings, load
from headrace.telemetry.logs import set_up_logging
from headrace.telemetry.setup import set_up_telemetry

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def run_service(
    name: str, settings_class: type[SettingsT], serve: Callable[[SettingsT], Coroutine[Any, Any, None]]
) -> None:
    """Runs `serve(settings)` on uvloop.

    Exits with EX_CONFIG if a setting is wrong, with EX_TEMPFAIL if a later attempt to start may succeed.
    """
    try:
        settings = load(settings_class, f"headrace_{name}")
        # The hub's client reports every request that went well.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        with ExitStack() as telemetry:
            telemetry.callback(set_up_telemetry(f"headrace-{name}"))
            telemetry.callback(set_up_logging(name, settings.log_level, settings.log_format))
            raise_descriptor_limit(logging.getLogger(__name__).warning)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(settings))
    except StartupError as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(os.EX_TEMPFAIL if error.is_fault else os.EX_CONFIG) from None
    # Everything is closed. An ordinary exit would also free gRPC's memory piece by piece: after thousands of calls that
    # takes seconds, and the supervisor would kill the process before its end.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
