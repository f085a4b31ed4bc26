"""Benchmarks of training steps, quantizers, the data pipeline and parallel runs (`make bench`)."""
