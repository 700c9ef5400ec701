"""Serving calls: start, stop, telemetry, health, errors of every service."""
