"""What a batch holds on a card that is not there."""
