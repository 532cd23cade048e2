"""What a developer of emutpu runs from the repository root. Not installed."""
