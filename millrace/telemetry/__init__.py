"""Tracing: set-up and the gRPC interceptors of both sides."""
