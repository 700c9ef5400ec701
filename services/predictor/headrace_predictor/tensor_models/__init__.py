"""Models with tensor inputs and outputs: Python models, classification, embeddings."""
