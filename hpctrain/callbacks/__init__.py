"""Callbacks with which programs of other libraries save at a stop request, exit with 75, and resume.

One file per library, which imports it: ``transformers`` for the Hugging Face Trainer, ``lightning``, ``accelerate``.
Without a supervisor they only save and resume as the library does.
"""
