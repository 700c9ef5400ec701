"""What keeps an answer going when its predictor fails."""
