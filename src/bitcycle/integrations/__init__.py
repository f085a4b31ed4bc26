"""Layers and trainers of other libraries; each module requires the library of its name and is imported on demand."""
