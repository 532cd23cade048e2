"""The model suite. Uses only what a user can use."""
