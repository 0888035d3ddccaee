"""The owner of the run folder: its files and their writers, and the one view of a run's status.

``view`` is for readers of any kind: it gives ``run_status``, ``progress`` and ``history``, derived from
``events``, ``attempt_record``, ``last_words`` and ``verdict``; ``resolve_run`` finds the run that a person means.
``folder`` names the files, ``attempts`` keeps run.json and the fence, ``live_lock`` admits one live run, ranks leave
``last_words``; of all facts ``first_cause`` chooses one, of which ``decision`` makes a verdict; ``stop_request`` is the
STOP file. ``rank_environment`` holds the variables that ranks start with; ``run_clock`` is the clock by which moments
of different hosts are compared; ``bad_nodes`` are nodes to leave out.
``grid`` gives the places of ranks that partition a model. ``figures`` is what a report shows besides events: curves
and matrices of metrics, plans, pictures.
``time_account`` says where the wall time went. ``event_log`` writes events, ``growing_file`` follows files, ``logs``
reads what ranks printed.
"""
