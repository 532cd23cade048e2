"""ATen lowerings by family."""
