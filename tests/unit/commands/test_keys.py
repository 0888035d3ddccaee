"""``hpctrain keys``: what it lists, and the schema that editors check run files with."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from hpctrain.cli import main
from hpctrain.config.reference import keys
from tests.support.command import PROJECT


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["keys", *words]) == 0
    return capsys.readouterr().out


def test_keys_are_found_by_words_of_their_name_or_meaning(capsys):
    def named(*words):
        return [line for line in printed(capsys, *words).splitlines() if not line.startswith(" ")]

    assert named() == list(keys())
    assert named("optimizer.", "Eps") == ["optimizer.eps"]
    assert "train.clip_norm" in named("L2", "norm")
    assert "optimizer.lr" in named("lr") and "launch.preflight" not in named("lr"), "allreduce"
    assert "launch.preflight" in named("llreduce"), "nowhere at the beginning of a word"


def test_a_word_that_no_key_has_is_said(cli):
    cli("keys", "no-such-key", code=64)


def test_help_fits_a_screen(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and any("hpctrain keys" in line for line in lines)


def test_the_schema_takes_the_examples_and_refuses_what_loading_refuses(capsys):
    schema = json.loads(printed(capsys, "--schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    examples = [yaml.safe_load(path.read_text()) for path in sorted((PROJECT / "examples").glob("*.yaml"))]
    assert len(examples) >= 5
    for example in examples:
        check.validate(example)
    for wrong in (
        {"globl": 3},
        {"train": {"epochs": "three"}},
        {"train": {"precision": "fp8"}},
        {"launch": {"hosts": 1}},
    ):
        assert not check.is_valid(examples[0] | wrong)
    assert not check.is_valid({"task": "a:b"}), "name is required"


def test_defaults_are_of_the_types_of_their_keys(capsys, tmp_path):
    schema = json.loads(printed(capsys, "--schema"))
    for name, key in keys().items():
        at = schema
        for part in name.split("."):
            at = at["properties"][part]
        if key.default is not None:
            jsonschema.validate(at["default"], at)
