"""The largest batch that fits, by real training steps."""
