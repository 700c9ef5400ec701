"""Front ends: one adapter for each protocol that callers speak."""
