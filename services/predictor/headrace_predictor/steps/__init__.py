"""Token generation for transformers: one call each, one message for each step of an engine (steps.proto)."""
