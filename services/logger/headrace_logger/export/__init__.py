"""Exports the payload log to files: whole records, or the formats that other tools read."""
