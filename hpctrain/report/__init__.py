"""What a run was: its report, what ended or slowed it, and several runs side by side.

``page`` is the report, ``explain`` and ``compare`` are the commands of these names, ``summary`` the numbers of a run.
``plots`` and ``svg`` draw, ``plan_plot`` draws what ``hpctrain plan`` found, and ``chart`` writes pictures. All see a
run through ``hpctrain.run`` alone.
"""
