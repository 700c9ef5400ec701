"""The protocol's state of one connection, which the `h2` library has, with our settings."""

import struct

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

# As in envoy/envoy.yaml. The window of the connection is that of all its streams: one that is not read blocks no other.
MAX_STREAMS = 256
STREAM_WINDOW_BYTES = 512 * 1024
_CONNECTION_WINDOW_BYTES = MAX_STREAMS * STREAM_WINDOW_BYTES
_DEFAULT_WINDOW_BYTES = 65_535  # Of a new connection, by the protocol.
_MAX_HEADER_BYTES = 64 * 1024  # Of one request; what h2 keeps to by itself.

_DATA = 0  # The type of the frame.
_frame_head = struct.Struct(">HBBBL").pack  # Length in 24 bits, type, flags, stream. Source: RFC 9113, 4.1.

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

    def write_data(self, stream_id: int, data: bytes) -> None:
        """Adds a DATA frame to what is to be sent: of a stream that we have not ended and the peer has not reset, and
        no larger than `local_flow_control_window` and `max_outbound_frame_size` allow.

        The library's `send_data` checks all of that once more, by way of objects for states and frames, and takes 20
        times as long, for each token.
        """
        size = len(data)
        self.streams[stream_id].outbound_flow_control_window -= size
        self.outbound_flow_control_window -= size
        self._data_to_send += _frame_head(size >> 8, size & 0xFF, _DATA, 0, stream_id) + data
