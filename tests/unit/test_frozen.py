"""Values of the modules that decide are frozen: nobody changes what others hold."""

import dataclasses
import importlib

import pytest

MODULES = (
    "checkpoint.format.layout",
    "checkpoint.policy",
    "data.order",
    "monitor.chief.hang",
    "monitor.chief.judge",
    "report.explain",
    "run.events",
    "run.history",
    "run.progress",
    "train.schedule",
)


@pytest.mark.parametrize("name", MODULES)
def test_dataclasses_are_frozen(name):
    module = importlib.import_module(f"hpctrain.{name}")
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__ and dataclasses.is_dataclass(each)
    ]
    assert found
    for kind in found:
        value = object.__new__(kind)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(kind)[0].name, None)
