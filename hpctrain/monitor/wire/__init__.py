"""The agents' protocol: authenticated frames (``framing``), a ``connection``, and the listening side (``door``)."""
