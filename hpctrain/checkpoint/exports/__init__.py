"""Exports a checkpoint's weights to the formats of other programs; each imports its library on use.

``weights`` are written as files, or in folders of Hugging Face; ``safetensors`` is their format, and ``lora`` merges
adapters.
"""
