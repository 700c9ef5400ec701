"""How a model runs one step: paged, hybrid, encoder-decoder, one row at a time."""
