"""Models that take and give tensors of their own: Python models, classification, embeddings."""
