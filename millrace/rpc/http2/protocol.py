"""The protocol's state of one connection, which the `h2` library has, with our settings."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

# As in envoy/envoy.yaml. The connection's window is that of all its streams: one that nobody reads stops no other.
MAX_STREAMS = 256
STREAM_WINDOW_BYTES = 256 * 1024
_CONNECTION_WINDOW_BYTES = MAX_STREAMS * STREAM_WINDOW_BYTES
_DEFAULT_WINDOW_BYTES = 65_535  # Of a new connection, by the protocol.
_MAX_HEADER_BYTES = 64 * 1024  # Of one request; what h2 keeps to by itself.

_CONFIG = H2Configuration(
    client_side=False,
    # The gateway has validated and normalised what comes; an error here would end the calls of other callers too.
    header_encoding=None,
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)
_SETTINGS = {
    SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
    SettingCodes.MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
    SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
}


class ProtocolState(H2Connection):
    """A server's side that has just begun: its settings and its window wait to be sent."""

    MAX_CLOSED_STREAMS = 1024  # How each stream ended is kept, 64 times as many by default.

    def __init__(self) -> None:
        super().__init__(_CONFIG)
        self.local_settings = Settings(client=False, initial_values=_SETTINGS)
        self.initiate_connection()
        self.increment_flow_control_window(_CONNECTION_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)
