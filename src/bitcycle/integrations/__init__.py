"""Layers and trainers of other libraries; each module needs the library that it is named after, and nothing else imports it."""
