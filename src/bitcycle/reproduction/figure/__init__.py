"""Figures, tables and pages of results."""
