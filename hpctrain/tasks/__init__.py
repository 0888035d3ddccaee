"""What a user hands over: a model, how to judge it, and the data.

``definition`` is what a task function returns, ``loading`` finds the function and looks at its fields,
``user_errors`` puts errors of its code into sentences, ``meters`` tells which metrics keep a state. The other files are
tasks that come with the package: ``torch_digits``, ``tensorflow_digits`` and ``torch_chartext``.
"""
