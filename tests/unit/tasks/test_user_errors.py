"""Which line of a traceback is the user's, and advice on common errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.system import user_errors
from hpctrain.system.user_errors import advice_on, own_line


@pytest.mark.parametrize("folder", [Path(f"{user_errors.PACKAGE}-runs"), Path("/home/somebody/project")])
@pytest.mark.parametrize("library", ["/usr/lib/python3/dist-packages/torch/nn.py", "/opt/site-packages/keras/model.py"])
def test_libraries_and_pythons_own_modules_are_not_the_users(folder, library):
    names: dict[str, object] = {"loads": json.loads}
    exec(compile("def inside(loads):\n    loads('{')\n", library, "exec"), names)  # noqa: S102
    exec(compile("\ndef task():\n    inside(loads)\n", str(folder / "task.py"), "exec"), names)  # noqa: S102
    with pytest.raises(json.JSONDecodeError) as caught:
        names["task"]()  # type: ignore[operator]
    assert own_line(caught.value) == " (task.py:3)"


@pytest.mark.parametrize(("value", "advises"), [("{'a': 1}", True), ("None", False)])
def test_only_outputs_and_batches_are_advice_on_values_that_are_no_tensors(value, advises):
    text = f"Attempt to convert a value ({value}) with an unsupported type to a Tensor."
    assert bool(advice_on(text)) is advises
