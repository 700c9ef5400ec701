"""The local runner: runs the stack of docker compose as local processes, with a real Envoy."""

from headrace import plugins  # noqa: F401  # First.
