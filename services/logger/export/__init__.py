"""Exports the payload log to a file: Parquet or JSON lines."""
