"""Where the tests find what makes torchvision importable beside the CPU build of torch."""

from emutpu.conformance.torchvision_schemas import declare

__all__ = ["declare"]
