"""The run folder: its files, the code that writes them, and the one view of a run's status.

Readers use ``run_view``: it returns ``run_status``, ``progress`` and ``history``, derived from ``events``,
``attempts``, ``last_words`` and ``verdict``. ``resolve_run`` finds the run that a command line means.

``folder`` names the files; ``attempts`` keeps run.json and fences off old attempts; ``live_lock`` admits one live run;
``stop_request`` is the STOP file. Each rank leaves ``last_words``; ``first_cause`` selects the fact that explains a
failure, and ``decision`` turns it into a verdict. ``rank_environment`` defines the variables that ranks start with;
``bad_nodes`` lists nodes to leave out; ``grid`` maps ranks to their parts of a model. ``event_log`` reads and writes
events; ``time_account`` says where the wall time went; ``figures`` holds what a report shows besides events (curves,
matrices, plans, pictures). ``tail`` follows files; ``logs`` reads the ranks' output.

It is one room, not three for folder, verdicts and locks, since each needs the other two: an attempt's record holds its
verdict and takes its number as a lock does, and a verdict is decided from the records of the attempts before it.
"""
