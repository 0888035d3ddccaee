"""What a run was: its report, what ended or slowed it, and several runs side by side.

``page`` is the report, ``explain`` and ``compare`` are the commands of these names, ``summary`` the numbers of a run.
Sweeps are compared, too. ``plots`` chooses what is plotted, ``charts`` says how, and ``drawing`` makes SVG of it by
matplotlib, if that is installed. All see a run through ``hpctrain.run`` alone.
"""
