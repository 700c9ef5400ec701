"""Token generation for transformers: one connection each, one message for each step of an engine (steps.proto)."""
