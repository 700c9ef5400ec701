"""How a model runs one step: paged, batched, ragged decoder (T5), one row at a time."""
