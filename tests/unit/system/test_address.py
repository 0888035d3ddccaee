"""Whether a service answers, before a library waits minutes for it."""

from __future__ import annotations

import socket

import pytest

from hpctrain.errors import UserError
from hpctrain.system.address import require_answer


def test_a_service_that_answers_at_one_of_its_addresses_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        there, gone = (f"127.0.0.1:{one.getsockname()[1]}" for one in (server, other))
        other.close()
        require_answer("the master", [gone, there], "start it")
        with pytest.raises(UserError) as caught:
            require_answer("the master", [gone], "start it")
    assert str(caught.value.what) == f"the master does not answer at {gone}: Connection refused"
