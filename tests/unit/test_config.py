"""Settings: where each value comes from, what is refused, and that the refusal says what to do."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from p2pckpt.config import Config, resolve
from p2pckpt.errors import ConfigError


def test_defaults_are_themselves_allowed_and_each_has_a_reason():
    found = resolve({}, {})
    assert found.config == Config()
    assert set(found.origins.values()) == {"default"}
    for f in fields(Config):
        assert len(f.metadata["why"]) > 5, f.name
        low, high, value = f.metadata["low"], f.metadata["high"], getattr(found.config, f.name)
        assert low is None or low <= value, f.name
        assert high is None or value <= high, f.name
        if f.name.endswith(("_s", "_bytes")) or type(value) in (int, float):
            assert type(value) is bool or low is not None, f"{f.name} needs a bound"


def test_flags_then_variables_then_file_then_defaults():
    text = "# settings\nlease_s = 20\n\nnode = 'file'\nworkers = 3\n"
    environ = {"P2PCKPT_NODE": "variable", "P2PCKPT_WORKERS": "4", "OTHER": "x"}
    found = resolve({"workers": 5, "node": None}, environ, text, "/etc/p.toml")
    config = found.config
    assert (config.workers, config.node, config.lease_s) == (5, "variable", 20.0)
    assert found.origins["workers"] == "flag"
    assert found.origins["node"] == "P2PCKPT_NODE"
    assert found.origins["lease_s"] == "/etc/p.toml:2"
    assert found.origins["keepalive_s"] == "default"
    assert type(config.lease_s) is float


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1", True), ("true", True), ("TRUE", True), ("0", False), ("false", False)],
)
def test_truths_from_variables(text, wanted):
    assert resolve({}, {"P2PCKPT_TRIAL": text}).config.trial is wanted


@pytest.mark.parametrize(
    ("key", "value"),
    [("trial", "yes"), ("trial", ""), ("workers", "two"), ("workers", "1.5"), ("workers", ""),
     ("workers", "0"), ("workers", "65"), ("lease_s", "nan"), ("lease_s", "inf"),
     ("lease_s", "-1"), ("lease_s", "1e9"), ("chunk_bytes", "1048576"), ("min_spare", "-2"),
     ("peer_timeout_s", "0"), ("floor_bytes_per_s", "0"), ("max_ballots", "0")],
)  # fmt: skip
def test_a_wrong_value_names_key_origin_and_what_is_allowed(key, value):
    variable = f"P2PCKPT_{key.upper()}"
    with pytest.raises(ConfigError) as caught:
        resolve({}, {variable: value})
    message = str(caught.value)
    assert variable in message
    assert key in message
    assert "needs" in message
    with pytest.raises(ConfigError, match=f"--{key.replace('_', '-')}"):
        resolve({key: value}, {})


@pytest.mark.parametrize(
    ("line", "reason"),
    [("workers = 'two'", "workers"), ("workers = 1.5", "needs int"),
     ("workers = true", "needs int"),
     ("trial = 1", "needs bool"), ("node = 7", "needs str"), ("lease_s = true", "needs float"),
     ("workers = [1]", "needs int"), ("lease_s = nan", "needs")],
)  # fmt: skip
def test_a_wrong_type_in_the_file_names_file_and_line(line, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve({}, {}, "\n" + line, "p.toml")
    assert "p.toml:" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        ({}, "worker = 3", "p.toml:1: unknown key 'worker'; nearest: workers"),
        ({}, "[agent]\nnode = 'x'", "unknown key 'agent'"),
        ({"xyzzy": 3}, "", "unknown key 'xyzzy'; known: node, "),
    ],
)
def test_an_unknown_key_names_the_nearest(flags, text, message):
    with pytest.raises(ConfigError, match=message):
        resolve(flags, {}, text, "p.toml")


def test_an_unknown_variable_names_the_nearest():
    with pytest.raises(ConfigError, match="ram_budget_bytes"):
        resolve({}, {"P2PCKPT_RAM_BUDGET_BYTE": "1000000"})


@pytest.mark.parametrize("text", ["node = ", "node 'x'", "node = 'a'\nnode = 'b'", "\x00"])
def test_what_is_no_toml_names_the_file(text):
    with pytest.raises(ConfigError, match=r"p\.toml"):
        resolve({}, {}, text, "p.toml")


def test_keepalive_needs_room_in_the_lease():
    with pytest.raises(ConfigError, match="half of lease_s"):
        resolve({"lease_s": 4.0, "keepalive_s": 2.1}, {})
    assert resolve({"lease_s": 4.0, "keepalive_s": 2.0}, {}).config.keepalive_s == 2.0


def test_a_random_delay_has_low_below_high():
    with pytest.raises(ConfigError):
        resolve({"commit_delay_low_s": 3.0, "commit_delay_high_s": 1.0}, {})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", {}), ("rack=r1", {"rack": "r1"}), ("rack=r1,pod=p0", {"rack": "r1", "pod": "p0"}),
     (" rack=r1 , pod=p0,", {"rack": "r1", "pod": "p0"})],
)  # fmt: skip
def test_domains(text, wanted):
    assert resolve({"domains": text}, {}).config.domain_map == wanted


@pytest.mark.parametrize("text", ["rack", "rack=", "=r1", "rack=r1,pod"])
def test_domains_that_are_none_are_refused_at_once(text):
    with pytest.raises(ConfigError, match="needs level=name"):
        resolve({"domains": text}, {})


@pytest.mark.parametrize("text", ["rack = r1", "rack=a,rack=b"])
def test_domains_are_never_silently_another(text):
    try:
        found = resolve({"domains": text}, {}).config.domain_map
    except ConfigError:
        return
    assert found == {"rack": "r1"}


def test_spread_is_every_domain_unless_it_is_said():
    config = Config(domains="rack=r1,pod=p0")
    assert config.spread_levels == (("rack", False), ("pod", False))
    assert replace(config, spread="pod!, rack").spread_levels == (("pod", True), ("rack", False))
    assert Config().spread_levels == ()


def test_secrets_are_not_shown():
    found = resolve({"key": "/etc/secret.pem"}, {}).shown()
    assert found["key"]["value"] == "***"
    assert "secret.pem" not in str(found)
    assert found["key"]["origin"] == "flag"
    assert resolve({}, {}).shown()["key"]["value"] == ""


def test_a_config_never_changes():
    with pytest.raises(FrozenInstanceError):
        Config().node = "x"
