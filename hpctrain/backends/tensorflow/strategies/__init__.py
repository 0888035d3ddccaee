"""How updates of a Keras model are distributed over ranks: ``strategy`` is the protocol, whole weights the rule."""
