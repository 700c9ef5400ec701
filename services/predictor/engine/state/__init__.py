"""What a sequence is and what it holds: blocks, cache, output slot."""
