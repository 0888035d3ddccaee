"""Checkpoints in HDF5: written in the background, verified when read, and used to resume runs.

``store`` is the general interface to save and load; ``hook`` uses it in training runs, with ``resume`` (which looks
for checkpoints in all places), ``save_schedule`` (when), ``contents`` (what) and ``place`` (where they may be), and
speaks through ``reporter``. ``saver`` writes in the background, ``policy`` has the rules of when to save and what to
keep, ``checkpoint_folder`` commits, ``format`` defines the files. ``reading`` loads tensors, ``verify`` and
``inspect`` examine a checkpoint, ``resume_compat`` checks that a run may resume from one, and ``initial`` starts from
one's weights, by the rules of ``initial_match``; ``frozen`` leaves weights in their source. ``tiers`` keeps snapshots
on the nodes, ``remote`` copies checkpoints to an object store (``objects``), and ``mirror`` opens those that a user
names, there or on disk. ``export`` writes weights for other programs: ``safetensors`` encodes that format,
``dcp`` reads PyTorch's distributed checkpoints, and ``lora`` merges adapters.
"""
