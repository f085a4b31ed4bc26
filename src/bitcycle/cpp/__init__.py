"""C++ operators for a CPU, compiled on first use."""
