"""From logits to token ids, and what a vocabulary forbids."""
