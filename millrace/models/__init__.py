"""Where models come from, of what kind they are, and how their files reach the local disk."""
