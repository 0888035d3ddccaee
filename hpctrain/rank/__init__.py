"""Inside one rank: it joins the others, builds its objects from the run file, trains, and leaves its last word.

``session`` is a rank from start to end, ``problem`` the user's task and data, ``batches`` this rank's part of the data.
``wiring`` is the one place that knows which class implements what, and ``fit`` the training itself. ``trial`` opens a
task without a run: for the doctor, with the weights of a file, or to measure a model's memory. ``predictions`` joins
the ranks' outputs. ``plain_command`` is a rank of another program, ``convention`` the variables that it gets,
``heartbeat`` what it may call.
"""
