"""Quantized layers: where a product quantizes its operands and the gradient of its output."""
