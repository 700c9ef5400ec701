"""The local runner: the stack of docker compose as local processes, the real Envoy included."""
