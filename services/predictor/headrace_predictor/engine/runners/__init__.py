"""How a model runs one step: paged, ragged decoder (T5), one row at a time."""
