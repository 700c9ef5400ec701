"""Telemetry that every service has: providers, the gRPC interceptors of both sides, log lines, the Prometheus page."""
