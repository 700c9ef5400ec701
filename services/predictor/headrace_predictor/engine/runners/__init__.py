"""How a model runs one step: paged, hybrid, batched, encoder-decoder, one row at a time."""
