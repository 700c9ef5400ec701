"""The SQLite store: schema, writing, reading, removing, retention."""
