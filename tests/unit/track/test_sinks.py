"""Sinks of the run file: one table makes them, and says what they need."""

import configparser
from dataclasses import fields
from pathlib import Path

import pytest

from hpctrain.config.sections import TrackConfig
from hpctrain.doctor import software
from hpctrain.doctor.check import Status
from hpctrain.errors import MissingExtra
from hpctrain.run.folder import RunDir
from hpctrain.track import sinks
from hpctrain.track.follower import FollowerSink
from hpctrain.track.sinks import PACKAGES, make_sinks, missing_extras


def test_each_sink_is_turned_on_by_a_key_of_the_run_file():
    defaults = {field.name: field.default for field in fields(TrackConfig)}
    assert {key: bool(defaults[key]) for key in PACKAGES} == dict.fromkeys(PACKAGES, False)


def test_an_extra_with_the_name_of_the_key_installs_the_package():
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[3] / "setup.cfg")
    extras = config["options.extras_require"]
    assert {key for key, package in PACKAGES.items() if not extras[key].startswith(package)} == set()


def test_only_named_sinks_are_made_and_after_console_and_logging(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: object())
    assert len([*make_sinks(TrackConfig(), RunDir(tmp_path), "digits")]) == 2
    _, _, only = make_sinks(TrackConfig(mlflow="store", mlflow_experiment="night"), RunDir(tmp_path), "digits")
    assert isinstance(only, FollowerSink)
    assert (only.name, only.words) == ("mlflow", (str(tmp_path), "store", "night"))


def test_a_package_that_is_missing_is_named_before_the_run_and_by_the_doctor(tmp_path, monkeypatch):
    track = TrackConfig(tensorboard=True, prometheus="run.prom")
    assert not list(missing_extras(TrackConfig()))
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None if name == "prometheus_client" else name)
    with pytest.raises(MissingExtra, match=r"prometheus-client is not installed\n  fix: pip install .*prometheus]"):
        [*make_sinks(track, RunDir(tmp_path), "digits")]
    (found,) = software.sinks(track)
    assert (found.status, found.value) == (Status.PROBLEM, "prometheus-client is not installed")
