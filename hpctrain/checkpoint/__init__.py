"""State of a run saved to HDF5 while training continues, verified when it is read, and resumed from.

``store`` is for everybody, also to resume, ``hook`` for training runs; ``saver`` writes in the background, ``policy``
says when and which ones are kept, ``folder`` commits, ``format`` is what lies on the disk. ``reading`` gives a
checkpoint's tensors, ``verify`` and ``inspect`` look at one, ``resume_compat`` says what must be equal to continue from
one, and ``initial`` begins with the weights of one, by the rules of ``initial_match``. ``remote`` copies them to an
object store (``objects``), ``mirror`` finds those that a person names, there or on disk. ``exports`` gives weights to
other programs.
"""
