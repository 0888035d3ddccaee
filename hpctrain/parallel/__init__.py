"""Training of what does not fit on one rank.

``tensor_words`` is what a task says of how its layers are cut, and ``torch_tensor`` cuts those of a PyTorch model:
``torch_region`` has the sums between the ranks that share it out, and ``torch_classes`` the loss of a last layer that
is cut. ``pipeline`` says which layers each stage of a pipeline has, and in which order it passes micro-batches;
``stage_choice`` keeps the stages of a run, and has the ranks agree on what a layer takes; ``torch_pipeline`` leaves a
rank the layers of its stage, and ``torch_stage`` speaks with the other stages. Ranks send tensors by
``torch_exchange``, through memory of the host or from GPU to GPU. ``sharded`` says which rows of which
parameters each rank updates, ``sharded_exchange`` moves gradients to who updates and parameters back, and
``torch_sharded`` and ``tensorflow_sharded`` are what frameworks get of it. ``torch_fully_sharded`` leaves each rank its
rows of all parameters, over the collectives of torch that ``torch_group`` opens, and ``torch_tables`` rows of tables
alone, which ranks ask each other for. ``torch_probe`` and
``tensorflow_probe`` ask an optimizer whether its parameters may be shared out or cut, on tensors of the shapes that
``trial`` gives. ``plan`` says what a rank needs under each plan. The names above are for other rooms; torch and
TensorFlow are loaded by the modules that need them.
"""
