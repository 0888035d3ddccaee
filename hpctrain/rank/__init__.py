"""Code that runs inside a rank: joins the other ranks, builds objects from the run file, trains, says how it ended.

``session`` handles a rank from start to end; ``problem`` loads the user's task and data; ``batches`` makes this rank's
part of the data. ``wiring`` is the one place that knows which class implements what; ``fit`` trains. ``stop_requests``
lets ranks agree to stop. ``trial`` opens a task outside a run: for the doctor, with weights from a file, or to estimate
memory; ``plan_check`` builds the plan of some ranks without the others. ``predictions`` writes all ranks' outputs to
one file.
"""
