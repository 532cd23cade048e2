"""Clients that implement the PjRt protocol, and the model of the chip beneath them. Knows nothing of PyTorch."""

from .clients import CLIENTS, make_client

__all__ = ["CLIENTS", "make_client"]
