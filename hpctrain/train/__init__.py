"""The training loop, and what attaches to it. Knows no framework.

``loop`` trains by a ``framework``, whose protocol is there, with what it gets of a run file; ``hooks`` attach to it,
and ``state`` says where a run stands. ``schedule`` says how long it trains and sets the learning rate, ``seeds`` the
random numbers; ``evaluation`` judges by ``metrics``, with equally many passes on all ranks, ``watchers`` end a run or
lower the rate by them, compare weights and trace steps, and ``flops`` says how much of a device's speed is used.
``reach`` and ``tree`` find and take apart what objects of the user's hold, and ``stateful`` is for those that say it
themselves, ``saved_arrays`` for arrays among it. ``clock`` times the phases of a step. ``refusals`` are what does not
go together.
"""
