"""From a float model to its quantized twin, and back to files without this library."""
