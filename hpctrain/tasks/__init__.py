"""Tasks: what the user provides, which is a model, its loss and metrics, and the data.

``definition`` has the classes that a task function returns, and the words with which it says how layers are split.
``tp_plan`` reads these from a model of Hugging Face. ``load_task`` imports the function and checks the fields of its
task, ``tf_environment`` prepares that import, ``meters`` adapts metrics that keep state, ``mean_check`` tries whether
losses and metrics can be averaged. The other files are example tasks that come with the package: ``torch_digits``,
``tensorflow_digits`` and ``torch_chartext``.
"""
