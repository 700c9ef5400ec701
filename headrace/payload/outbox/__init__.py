"""The outbox of a process: records as files on disk until the logger has acknowledged them."""
