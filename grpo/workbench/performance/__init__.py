"""What this machine reaches, and which of its switches are off."""
