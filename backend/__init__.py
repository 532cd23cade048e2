"""The PyTorch side: storages, lowerings, the eager engine and its cache. Targets the PjRt protocol and nothing else."""
