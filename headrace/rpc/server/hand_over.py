"""How a service passes its port to its successor: both listen on it for a moment, so that no call is refused.

The successor loads first, listens beside its predecessor (SO_REUSEPORT) and reports so by systemd's readiness protocol:
the datagram `READY=1` to the socket that NOTIFY_SOCKET names. Then the supervisor sends RETIRE to the predecessor,
which stops listening, sends its connections away by GOAWAY and ends when the calls that it has have ended. SIGTERM
shortens that to the ordinary drain.
"""

from __future__ import annotations

import logging
import os
import signal
import socket

logger = logging.getLogger(__name__)

RETIRE = signal.SIGUSR1
READY_MESSAGE = b"READY=1"
NOTIFY_SOCKET = "NOTIFY_SOCKET"


def report_listening() -> None:
    """Sends READY to the supervisor, where there is one."""
    address = os.environ.get(NOTIFY_SOCKET)
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract names.
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            supervisor.sendto(READY_MESSAGE, address)
    except OSError as error:
        logger.warning("the supervisor at %s was not notified: %s", os.environ[NOTIFY_SOCKET], error)
