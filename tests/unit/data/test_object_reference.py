"""Objects that data workers make again, without pickle."""

import enum
import functools
import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data.object_reference import Describer, Rebuilder, Unsuited
from hpctrain.data.worker import import_function, refer_to_function
from hpctrain.errors import UserError


class Mode(enum.Enum):
    NEAREST = 1


class Transform:
    """Has state of its own, as modules of torch do."""

    def __init__(self) -> None:
        self.factor, self.mode, self.cache = np.float32(2), Mode.NEAREST, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, cache=threading.Lock())

    def __call__(self, value: float) -> float:
        return float(self.factor * value)


def load(number: int, base: int) -> int:
    return number + base


class Folder:
    """Like torchvision's ImageFolder."""

    def __init__(self) -> None:
        self.samples = [(f"{index}.jpg", index % 2) for index in range(4)]
        self.imgs = self.samples
        self.classes, self.root = OrderedDict(cat=0, dog=1), Path("/data")
        self.load, self.transform, self.apply = functools.partial(load, base=3), Transform(), Transform().__call__
        self.kinds, self.weights, self.dtype = {".jpg"}, np.arange(3.0), np.dtype(np.uint8)
        self.itself = self


def again(value: Any) -> Any:
    describer = Describer(functools.partial(refer_to_function, what="a part of the data"))
    given = json.loads(json.dumps(describer.describe(value)))
    return Rebuilder(describer.arrays, import_function).rebuild(given)


def test_an_object_is_made_again():
    folder, made = Folder(), again(Folder())
    for name in ("samples", "classes", "root", "kinds", "dtype"):
        assert getattr(made, name) == getattr(folder, name)
        assert type(getattr(made, name)) is type(getattr(folder, name))
    assert made.imgs is made.samples and made.itself is made
    assert (made.load(1), made.transform(3), made.apply(3)) == (4, 6, 6)
    assert made.transform.mode is Mode.NEAREST and made.weights.tolist() == [0, 1, 2]


class Half:
    """A tensor of bfloat16, as PyTorch's are."""

    def detach(self) -> Any:
        return self

    cpu = detach

    def numpy(self) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Half, ()


def test_what_cannot_be_made_again_is_named():
    folder = Folder()
    for value, kind in ((threading.Lock(), r"_thread\.lock"), (np.complex64(1), r"numpy\.complex64"), (Half(), "Half")):
        folder.transform.factor = value  # type: ignore[assignment]
        with pytest.raises(Unsuited, match=rf"its transform\.factor is .*{kind}"):
            again(folder)
    folder.transform.factor = lambda value: value  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"a part of the data is .*lambda.*not at the top level of a module"):
        again(folder)
