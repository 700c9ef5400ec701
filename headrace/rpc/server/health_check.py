"""`python -m headrace.rpc.server.health_check PORT [NAME]`: exits 0 if the server on this machine is SERVING, else 1.

A container's HEALTHCHECK runs it every few seconds beside a busy model, so it imports little: the messages of
grpc.health.v1 are two bytes here instead of protobuf's stubs.
"""

import sys

import grpc

_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse: field 1, an enumeration, is 1.
_TIMEOUT_S = 3.0


def serving(address: str, name: str = "") -> bool:
    """Whether the server at `address` (host:port) reports `name` as served; blocks, for seconds at most."""
    encoded = name.encode()
    # HealthCheckRequest: field 1, a string; one shorter than 128 bytes has a length of one byte.
    request = b"\x0a" + bytes([len(encoded)]) + encoded if encoded else b""
    # Ignores a proxy in the environment: the server is in this container.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_CHECK)
        try:
            return check(request, timeout=_TIMEOUT_S) == _SERVING
        except grpc.RpcError:
            return False


def main() -> None:
    port, *name = sys.argv[1:]
    raise SystemExit(0 if serving(f"127.0.0.1:{int(port)}", *name) else 1)


if __name__ == "__main__":
    main()
