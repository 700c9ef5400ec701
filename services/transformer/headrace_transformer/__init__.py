"""The transformer: text to token ids and back, for every front end."""
