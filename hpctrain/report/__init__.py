"""Reports on runs: the HTML report, what ended or slows a run, and comparisons of runs.

``page`` renders the report; ``explain`` and ``compare`` (also for sweeps) implement the commands of these names;
``summary`` computes the numbers of a run. ``plots`` chooses what is plotted, ``charts`` defines the charts, and
``drawing`` makes SVG with matplotlib, if that is installed. All of them read runs only through ``hpctrain.run``.
"""
