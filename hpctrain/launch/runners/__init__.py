"""One process per node that dials home, where no remote shell reaches: Kubernetes, Ray, Spark.

``node`` is that process (`hpctrain node`), ``desk`` the supervisor's side, ``ask`` what mpirun calls in place of ssh;
``link`` is what they say to each other, and ``ticket`` how a node finds and trusts its supervisor.
"""
