"""Constrains answers to the grammars of `structured_outputs`."""
