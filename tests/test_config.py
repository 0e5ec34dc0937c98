"""The configuration: where it comes from, what it refuses and what it says."""

import inspect
import json
from collections import UserDict, UserList
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

import pytest

from gradtrack import GradientConfig, GradientManager, watch
from gradtrack.errors import ConfigError, InputTypeError, UnknownPluginError
from gradtrack.step.arguments import AllSettings, LightningSettings, Settings, WatchSettings
from tests.training import optimizer_of, small_model, train

SETTINGS = {"max_grad_norm": 2.5, "clip_type": "value", "backends": ["memory"]}


def write(path: Path, text: str) -> Path:
    """Write a file and return its path."""
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["yaml", "json", "toml"])
def test_file_formats_agree(tmp_path: Path, kind: str, wrapped: bool) -> None:
    """YAML, JSON and TOML say the same, alone or under a gradtrack section beside other keys."""
    nested = {"model": {"hidden": 3}, "gradtrack": SETTINGS} if wrapped else SETTINGS
    head = "[gradtrack]\n" if wrapped else ""
    toml = head + 'max_grad_norm = 2.5\nclip_type = "value"\nbackends = ["memory"]\n'
    path = write(tmp_path / f"c.{kind}", toml if kind == "toml" else json.dumps(nested))
    assert GradientConfig.load(path) == GradientConfig(**SETTINGS) == GradientConfig.load(str(path))


def test_keywords_override_a_source() -> None:
    """Keywords win over a mapping and over a configuration, which itself stays as it is."""
    config = GradientConfig(max_grad_norm=2.0)
    assert GradientConfig.load({"max_grad_norm": 2.0}, max_grad_norm=3.0).max_grad_norm == 3.0
    assert GradientConfig.load(config, clip_type="agc").max_grad_norm == 2.0
    assert config.clip_type == "norm"


def test_a_configuration_is_not_copied() -> None:
    """A manager uses the very object it was given, so that assignments reach it."""
    config = GradientConfig()
    assert GradientManager(config).config is config


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_grad_nrm": 1}, "Did you mean 'max_grad_norm'"),
        ({"max_grad_norm": -1}, "max_grad_norm = -1: expected greater than 0"),
        ({"max_grad_norm": 0}, "enable_gradient_clipping=False"),
        ({"max_grad_norm": float("nan")}, "finite"),
        ({"max_grad_norm": {}}, "expected at least one limit. Set enable_gradient_clipping=False"),
        ({"max_grad_norm": {"head": -1}}, "-1 for 'head': expected a number above 0. Leave out what is not to clip"),
        ({"max_grad_norm": {"head": True}}, "True for 'head': expected a number above 0"),
        ({"max_grad_norm": {"*": 1.0}}, "neither a group nor a regular expression .* Write '.\\*' for all parameters"),
        ({"max_grad_norm": {"(": 1.0}}, "neither a group nor a regular expression .* Escape its special characters"),
        ({"max_grad_norm": {"head": 1.0}, "clip_type": "agc"}, "clipped by agc. Set clip_type='norm'"),
        ({"max_grad_norm": {"head": 1.0}, "adaptive_clipping": True}, "clipped by adaptive. Set clip_type='norm'"),
        ({"norm_type": 0}, "norm_type = 0: expected greater than 0"),
        ({"clip_type": "nrm"}, "'norm', 'value', 'adaptive', 'agc' or 'zscore'"),
        ({"groups": {"a": "("}}, "not a regular expression"),
        ({"mute": ["["]}, "not a regular expression"),
        ({"backends": ["memry"]}, "Did you mean 'memory'?$"),
        ({"backends": ["tb"]}, "Did you mean 'tensorboard'?$"),
        ({"backends": ["w&b"]}, "Did you mean 'wandb'?$"),
        ({"backends": ["weights_and_biases"]}, "Did you mean 'wandb'?$"),
        ({"check_frequency": 0}, "check_frequency"),
        ({"backends": "json"}, r"expected a list. Write backends=['json']."),
        ({"backends": {"name": "json"}}, r"Write backends=[{'name': 'json'}]."),
        ({"backends": 3}, r"expected a list. Write backends=[...]."),
        ({"analyzers": "flow"}, r"expected a list or 'auto'. Write analyzers=['flow']."),
        ({"adaptive_percentile": 101}, "adaptive_percentile"),
        ({"adaptive_percentile": 0.95}, "expected a percentile from 0 to 100. Write 95 for that share."),
        ({"nan_inf_threshold": 5}, "expected less than or equal to 1"),
        ({"mute": ["SATURATON"]}, "unknown issue type 'SATURATON': .* Did you mean 'SATURATION'"),
        ({"mute": ["deaed:decoder.*"]}, "unknown issue type 'deaed': .* Did you mean 'DEAD'"),
        ({"mute": "DEAD"}, "expected a valid list. Write mute=['DEAD', "),
        ({"mute": [3]}, "mute.0 = 3: expected a valid string. Write mute="),
        ({"groups": ["enc.*"]}, "expected a valid dictionary. Write groups={'encoder': 'enc.*'}"),
        ({"max_grad_norm": True}, "max_grad_norm = True: expected a number, not a switch."),
        ({"check_frequency": True}, "expected a number, not a switch"),
        ({"vanishing_threshold": True}, "expected a number, not a switch"),
        (
            {"vanishing_threshold": 1, "exploding_threshold": 0.5},
            "expected vanishing_threshold (1",
        ),
        ({"run_dir": 3}, "run_dir = 3: expected a path. Write the path of a directory."),
        ({"analyzers": "Auto"}, "Write analyzers='auto'."),
        ({"analyzers": ["auto"]}, "Write analyzers='auto'."),
        ({"gradtrak": {}}, "Did you mean 'gradtrack'?"),
        ({"learning_rate": 0.1}, "Where a file holds other settings as well, put these under 'gradtrack'."),
        ({"lr": 0.1}, "Where a file holds other settings as well"),
        ({"gradient_clip_val": 1.0}, "Did you mean 'max_grad_norm'?"),
        ({"clip_norm": 1.0}, "Did you mean 'max_grad_norm'?"),
        ({"logging_steps": 10}, "Did you mean 'grad_log_every_n_steps'?"),
    ],
)
def test_errors_name_the_value_and_the_remedy(values: dict[str, Any], text: str) -> None:
    """What is not valid is refused with a text that helps."""
    with pytest.raises(ConfigError, match=text.replace("(", r"\(").replace("[", r"\[").replace("?", r"\?")):
        GradientConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"mute": ["dead", "DEAD:encoder.*", "decoder", "LSTM", "W_rec", "(?:a|b).c", "0.weight"]},
        {"adaptive_percentile": 0},
        {"adaptive_percentile": 1},
        {"max_grad_norm": "1.0"},
        {"max_grad_norm": 1},
        {"enable_gradient_clipping": "no"},
        {"check_frequency": 2.0},
        {"vanishing_threshold": 1e-6, "exploding_threshold": 10.0},
        {"nan_inf_threshold": 1},
    ],
)
def test_legitimate_values_are_taken(values: dict[str, Any]) -> None:
    """What can be meant is no error."""
    config = GradientConfig(**values)
    assert config.model_fields_set == values.keys()


def test_a_refused_order_of_thresholds_changes_nothing() -> None:
    """Assigned to a configuration in use as well, whichever of the two is assigned."""
    config = GradientConfig(vanishing_threshold=1e-3, exploding_threshold=10.0)
    with pytest.raises(ConfigError, match="expected vanishing_threshold"):
        config.exploding_threshold = 1e-4
    with pytest.raises(ConfigError, match="expected vanishing_threshold"):
        config.vanishing_threshold = 20.0
    assert (config.vanishing_threshold, config.exploding_threshold) == (1e-3, 10.0)


def test_wrong_types_of_plugins() -> None:
    """A number is no backend, and a mapping needs a name."""
    with pytest.raises(InputTypeError, match="expected a name"):
        GradientConfig(backends=[3])
    with pytest.raises((InputTypeError, ConfigError), match="'name'"):
        GradientConfig(backends=[{"directory": "x"}])


def test_unknown_plugin_at_the_manager() -> None:
    """The error of an unknown name is the same through the manager."""
    with pytest.raises((ConfigError, UnknownPluginError), match="unknown analyzer 'flwo'"):
        GradientManager(analyzers=["flwo"])


class TestFiles:
    """Files that cannot be used."""

    def test_missing(self, tmp_path: Path) -> None:
        """A path that is not there says so."""
        with pytest.raises(ConfigError, match="cannot be read"):
            GradientConfig.load(tmp_path / "nothing.yaml")

    def test_case_25_hostile_yaml_is_not_executed(self, tmp_path: Path) -> None:
        """A Python tag is refused and runs nothing."""
        target = tmp_path / "touched"
        text = f"run_dir: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{target}']]"
        with pytest.raises(ConfigError, match="Only plain data"):
            GradientConfig.load(write(tmp_path / "c.yaml", text))
        assert not target.exists()

    @pytest.mark.parametrize("text", ["- a\n- b", "just words", "3"])
    def test_not_a_mapping(self, tmp_path: Path, text: str) -> None:
        """A list or a scalar is not a configuration."""
        with pytest.raises(ConfigError, match="expected a mapping"):
            GradientConfig.load(write(tmp_path / "c.yaml", text))

    def test_broken(self, tmp_path: Path) -> None:
        """Text that does not parse is refused, and binary data as well."""
        with pytest.raises(ConfigError, match="cannot be parsed"):
            GradientConfig.load(write(tmp_path / "c.json", "{"))
        (tmp_path / "d.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="cannot be read"):
            GradientConfig.load(tmp_path / "d.yaml")

    def test_empty_file_is_the_default(self, tmp_path: Path) -> None:
        """Nothing in the file means the defaults."""
        assert GradientConfig.load(write(tmp_path / "c.yaml", "")) == GradientConfig()

    def test_wrong_type_of_source(self) -> None:
        """Neither a number nor a list is a source."""
        with pytest.raises(InputTypeError, match="expected a GradientConfig"):
            GradientConfig.load(3)  # type: ignore[arg-type]


class TestAction:
    """Which action applies to non-finite gradients."""

    def test_default_is_skip(self) -> None:
        """Nothing set means that the step is left out."""
        assert GradientConfig().nonfinite_action == "skip"

    def test_a_replacement_value_chooses_replace(self) -> None:
        """In the constructor and by assignment."""
        assert GradientConfig(replace_nan_with=0.5).nonfinite_action == "replace"
        config = GradientConfig()
        config.replace_inf_with = 3.0
        assert config.nonfinite_action == "replace"

    def test_an_explicit_action_wins(self) -> None:
        """Whatever else is set, the action that was chosen stays."""
        config = GradientConfig(replace_nan_with=0.5, nonfinite_action="raise")
        assert config.nonfinite_action == "raise"
        config.nonfinite_action = "report"
        assert config.nonfinite_action == "report"


class TestAssignment:
    """Settings that change while training runs."""

    def test_takes_effect_on_the_next_step(self) -> None:
        """A smaller limit clips the next step."""
        config = GradientConfig(max_grad_norm=1e6)
        manager = GradientManager(config)
        model = small_model()
        optimizer = optimizer_of(model)
        assert not train(manager, 1, model=model, optimizer=optimizer)[0].clipping.clipped
        config.max_grad_norm = 1e-6
        report = manager.step(model, optimizer, None, backward=False)
        assert report.clipping.clipped
        assert report.clipping.threshold == 1e-6

    def test_is_validated(self) -> None:
        """A wrong value is refused and the old one stays; a typo names the nearest field."""
        config = GradientConfig()
        with pytest.raises(ConfigError, match="greater than 0"):
            config.max_grad_norm = -1.0
        assert config.max_grad_norm == 1.0
        with pytest.raises(ConfigError, match="Did you mean 'max_grad_norm'"):
            config.max_grad_nrm = 2.0

    def test_arithmetic(self) -> None:
        """The documents' own idiom works."""
        config = GradientConfig()
        config.max_grad_norm *= 0.5
        assert config.max_grad_norm == 0.5


def test_pick_leaves_out_other_keys() -> None:
    """A flat training configuration gives up what is ours."""
    assert GradientConfig.pick({"hidden_size": 3, "grad_log_every_n_steps": 7}) == {"grad_log_every_n_steps": 7}


def test_defaults_are_documented() -> None:
    """Every setting has a sentence."""
    assert all(field.description for field in GradientConfig.model_fields.values())


class Bag:
    """A container as configuration libraries have them: it is no mapping for Python, and has its keys."""

    def __init__(self, **entries: Any) -> None:
        self._entries = entries

    def keys(self) -> Iterable[str]:
        """Return the names."""
        return self._entries.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]


Bag.__module__ = "ml_collections.config_dict"


@pytest.mark.parametrize(
    "kind", [Bag, lambda **entries: UserDict(entries), lambda **entries: MappingProxyType(entries)]
)
def test_containers_of_configuration_libraries(kind: Callable[..., Any]) -> None:
    """They work everywhere a dictionary does: as the source, its section, plugins, their options and other settings."""
    backends = UserList([kind(name="json"), "memory"])
    section = kind(
        max_grad_norm=0.5,
        backends=backends,
        analyzers=UserList([kind(name="gain", every=3)]),
        groups=kind(all=".*"),
        mute=UserList(["DEAD"]),
    )
    for source in (section, kind(gradtrack=section, model=kind(size=3))):
        config = GradientConfig.load(source)
        assert config.backends == [{"name": "json"}, "memory"]
        assert config.analyzers == [{"name": "gain", "every": 3}]
        assert (config.max_grad_norm, config.groups, config.mute) == (0.5, {"all": ".*"}, ["DEAD"])
    assert GradientConfig(backends=backends).backends == [{"name": "json"}, "memory"]
    manager = GradientManager(
        backends=UserList([kind(name="memory")]), analyzers=UserList([kind(name="gain", every=3)])
    )
    assert manager.analyzer("gain").looks_every == 3


def test_an_omegaconf_works() -> None:
    """Interpolations are resolved, and the file may be read as gradtrack's own."""
    omegaconf = pytest.importorskip("omegaconf")
    text = "limit: 0.5\ngradtrack: {max_grad_norm: '${limit}', backends: [{name: memory}]}"
    config = GradientConfig.load(omegaconf.OmegaConf.create(text))
    assert (config.max_grad_norm, config.backends) == (0.5, [{"name": "memory"}])


def test_a_list_that_is_an_option_stays_the_one_that_was_given() -> None:
    """Its owner may go on to change it."""
    kept = [1]
    (spec,) = GradientConfig(backends=[{"name": "memory", "kept": kept}]).backends
    assert spec["kept"] is kept


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_grad_norm", "0.25", 0.25),
        ("max_grad_norm", "1e-3", 1e-3),
        ("enable_gradient_clipping", "false", False),
        ("enable_gradient_clipping", "0", False),
        ("clip_type", "agc", "agc"),
        ("vanishing_threshold", "null", None),
        ("backends", "memory, json", ["memory", "json"]),
        ("backends", "[{name: json}, memory]", [{"name": "json"}, "memory"]),
        ("analyzers", "auto", "auto"),
        ("analyzers", "flow", ["flow"]),
        ("mute", "DEAD,SATURATION", ["DEAD", "SATURATION"]),
        ("groups", "{all: '.*'}", {"all": ".*"}),
        ("run_dir", "2024", Path("2024")),
        ("nonfinite_action", "report", "report"),
        ("max_grad_norm", " ", 1.0),
    ],
)
def test_the_environment_has_settings(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read as YAML, and a list may be names alone; an empty text sets nothing."""
    monkeypatch.setenv(f"GRADTRACK_{name.upper()}", text)
    assert getattr(GradientConfig(), name) == value
    assert getattr(GradientConfig.load(None), name) == value


def test_which_source_of_a_setting_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument, then the environment, then the file, then the default."""
    file = tmp_path / "a.yaml"
    file.write_text("gradtrack: {max_grad_norm: 3.0, check_frequency: 3, clip_type: value}")
    monkeypatch.setenv("GRADTRACK_MAX_GRAD_NORM", "2.0")
    monkeypatch.setenv("GRADTRACK_CHECK_FREQUENCY", "2")
    for source in (file, {"max_grad_norm": 3.0, "check_frequency": 3, "clip_type": "value"}):
        config = GradientManager(source, max_grad_norm=1.5).config
        assert (config.max_grad_norm, config.check_frequency) == (1.5, 2)
        assert (config.clip_type, config.max_gradient_history) == ("value", 1000)
    made = GradientConfig(max_grad_norm=1.5)
    assert GradientManager(made).config is made
    assert (made.max_grad_norm, made.check_frequency) == (1.5, 2)
    assert "max_grad_norm" in GradientConfig().model_fields_set


def test_a_mistake_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A value that cannot be meant is refused with its variable; a name that is nearly a setting is told."""
    monkeypatch.setenv("GRADTRACK_MAX_GRAD_NROM", "2.0")
    monkeypatch.setenv("GRADTRACK_PICTURES", "docs")
    GradientManager()
    assert caplog.messages == [
        "the environment's GRADTRACK_MAX_GRAD_NROM has no effect: it is no setting. "
        "Did you mean 'GRADTRACK_MAX_GRAD_NORM'?"
    ]
    monkeypatch.setenv("GRADTRACK_MAX_GRAD_NORM", "[much")
    with pytest.raises(ConfigError, match=r"max_grad_norm = '\[much': .*the environment has GRADTRACK_MAX_GRAD_NORM"):
        GradientConfig()


def test_the_environment_asks_a_watch_to_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting there is one that the user has made."""
    monkeypatch.setenv("GRADTRACK_MAX_GRAD_NORM", "0.5")
    model = small_model()
    with watch(model, optimizer_of(model)) as manager:
        assert (manager.config.enable_gradient_clipping, manager.config.max_grad_norm) == (True, 0.5)


_PUT_DOWN: dict[Any, Any] = {
    Any: float | Mapping[str, float],  # of max_grad_norm
    list[Any]: Sequence[Any],
    list[str]: Sequence[str],
    list[tuple[int, int]]: Sequence[Sequence[int]],
    dict[str, str]: Mapping[str, str],
    Path | None: str | Path | None,
    Literal["auto"] | list[Any]: Sequence[Any] | Literal["auto"],
}
"""The types of a configuration's settings that their keywords take more freely."""


def test_keywords_are_the_settings() -> None:
    """Every setting is a typed keyword of its type, and no other keyword is."""
    callback = pytest.importorskip("gradtrack.integrations.lightning").GradientStatisticsCallback
    settings = {name: field.annotation for name, field in GradientConfig.model_fields.items()}
    expected = {name: _PUT_DOWN.get(kind, kind) for name, kind in settings.items()}
    assert get_type_hints(AllSettings) == expected
    named = {
        Settings: GradientManager.__init__,
        LightningSettings: callback.__init__,
        WatchSettings: watch,
    }
    for typed, function in named.items():
        parameters = inspect.signature(function).parameters.keys() - {"overrides", "settings"}
        assert not typed.__annotations__.keys() & parameters
        assert expected.keys() <= typed.__annotations__.keys() | parameters


def test_a_typo_fails_before_it_runs() -> None:
    """A type checker refuses it, or `make check` would call these comments unused; and so does the manager."""
    model = small_model()
    optimizer = optimizer_of(model)
    with pytest.raises(ConfigError, match="Did you mean 'max_grad_norm'"):
        GradientManager(max_grad_nrom=1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Did you mean 'max_grad_norm'"):
        watch(model, optimizer, max_grad_nrom=1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="expected"):
        GradientManager(clip_type="norms")  # type: ignore[arg-type]
