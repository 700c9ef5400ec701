"""The engine: ids in, ids out. What is above it knows only `interface`."""
