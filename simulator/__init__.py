"""Clients that implement the PjRt protocol, and the model of the chip beneath them. Knows nothing of PyTorch."""
