"""One text generation, from text to text."""
