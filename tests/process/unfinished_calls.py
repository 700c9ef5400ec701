"""Frames of HTTP/2 for calls of gRPC whose message stays incomplete, which no client library sends."""

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW = 4  # Identifier of the setting.


def frame(kind, flags, stream, contents):
    return len(contents).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + contents


def headers(path):
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    literal = b""
    for name, value in fields.items():
        literal += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return literal
