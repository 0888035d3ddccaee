"""Exports a checkpoint's weights to the formats of other programs; each imports its library on use.

``weights`` writes files, or folders for Hugging Face; ``safetensors`` encodes the format, and ``lora`` merges adapters.
"""
