"""Pictures of a run folder in its report."""

import os

from hpctrain.report import page
from hpctrain.report.explain import explain
from hpctrain.run.figures import MOST_PICTURE_BYTES, MOST_PICTURES, PNG, read_pictures
from hpctrain.run.run_view import RunView


def test_the_last_pictures_are_shown_and_nothing_else(tmp_path):
    for number in range(MOST_PICTURES + 3):
        (tmp_path / f"step-{number:03d}.png").write_bytes(PNG + b"x")
    (tmp_path / "zz-script.png").write_bytes(b"<script>")
    (tmp_path / "zz-large.png").write_bytes(PNG + bytes(MOST_PICTURE_BYTES))
    (tmp_path / "zz-other.svg").write_bytes(PNG)
    os.mkfifo(tmp_path / "zz-pipe.png")
    found = read_pictures(tmp_path)
    assert [picture.name for picture in found] == [f"step-{number:03d}" for number in range(3, MOST_PICTURES + 3)]
    assert read_pictures(tmp_path / "missing") == []


def test_names_are_escaped(tmp_path):
    (tmp_path / '"><script>.png').write_bytes(PNG)
    data = RunView(tmp_path).history()
    text = page.render(data, explain(data), [], read_pictures(tmp_path))
    assert "<script>" not in text and "data:image/png;base64,iVBORw0KGgo=" in text
