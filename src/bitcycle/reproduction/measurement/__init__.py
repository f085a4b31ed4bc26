"""Measurements of trained networks: loss surfaces, planes, sharpness, robustness to corruptions and noise."""
