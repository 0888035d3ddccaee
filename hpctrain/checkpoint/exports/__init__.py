"""Exports a checkpoint's weights to the formats of other programs; each imports its library on use.

``weights`` are read there for all of them, and written as files of ``safetensors`` or in folders of Hugging Face;
``torch_state_dict`` is another kind of file, and ``lora`` an adapter.
"""
