"""Benchmarks of training steps, quantizers, data and parallel runs on this machine (`make bench`)."""
