"""The best checkpoint is a step wherever one is asked for."""

import numpy as np
import pytest

from hpctrain.checkpoint.mirror import locate_checkpoint
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import UserError
from hpctrain.run.resolve_run import step


@pytest.mark.parametrize("best", [[1, 2], []])
def test_best_is_the_newest_checkpoint_that_was_the_best(best, tmp_path):
    store = CheckpointStore(tmp_path)
    for number in (1, 2, 3):
        store.save({"model/w": np.full(2, number)}, {"best": number in best}, number)
    store.close()
    if not best:
        for call in (lambda: store.load_into(lambda _: {}, "best"), lambda: locate_checkpoint(f"{tmp_path}/best")):
            with pytest.raises(UserError, match="has no best checkpoint"):
                call()
        return
    assert locate_checkpoint(str(tmp_path), "best")[1] == locate_checkpoint(f"{tmp_path}/best")[1] == 2
    assert store.load_into(lambda _: {}, "best").step == 2
    assert step("best") == "best" and step("7") == 7
