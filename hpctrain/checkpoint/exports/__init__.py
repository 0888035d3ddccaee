"""Exports a checkpoint's weights to the formats of other programs; each imports its library on use.

``weights`` are read here for all of them: ``safetensors`` and ``torch_state_dict`` are files,
``hugging_face`` a folder, and ``lora`` an adapter.
"""
