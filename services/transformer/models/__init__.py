"""What the transformer knows of each model, and the processors that users supply."""
