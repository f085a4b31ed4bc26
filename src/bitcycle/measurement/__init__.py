"""Measurements of finished networks: loss surfaces, planes, sharpness, robustness to corruptions and noise."""
