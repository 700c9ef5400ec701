"""The payload log as a file: Parquet or JSON lines."""
