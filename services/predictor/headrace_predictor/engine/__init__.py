"""The engine: token ids in, token ids out. Code above it uses only `interface`."""
