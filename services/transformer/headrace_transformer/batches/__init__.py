"""OpenAI's Batch API: files, batches, and what runs them below the interactive requests."""
