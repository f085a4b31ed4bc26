"""C++ operators for a CPU, compiled on first use; README.md lists what each computes and saves."""
