"""What every served model fulfils, whatever its kind, and its weights."""
