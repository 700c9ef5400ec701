"""The state of a sequence: ids, blocks, cache, output slot."""
