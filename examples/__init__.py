"""Ordinary PyTorch programs that run on the emulated device. ``emutpu demo`` runs one of them."""
