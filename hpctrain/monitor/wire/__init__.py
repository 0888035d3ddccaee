"""How agents talk: messages in authenticated frames (``framing``), a ``connection``, and the door for strangers."""
