"""Samples token ids from logits."""
