"""Processes of the transformer: workers on one port, and those that parse large bodies."""
