"""The configuration of a run, from keywords, a mapping, or a YAML, TOML or JSON file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from gradtrack import registry
from gradtrack.errors import ConfigError, InputTypeError
from gradtrack.reports.issues import check_issue_type
from gradtrack.support.redact import redact, redact_values
from gradtrack.support.regular_files import plain, read_settings

_NUMBERS = (float, int, float | None)
ClipType = Literal["norm", "value", "adaptive", "agc", "zscore"]
Action = Literal["skip", "replace", "raise", "report"]
SpikeAction = Literal["report", "skip", "clip", "rollback"]
SECTION = "gradtrack"
_REMEDIES = {
    "max_grad_norm": " Set enable_gradient_clipping=False to train without clipping.",
    "mute": " Write mute=['DEAD', 'DEAD:encoder.*', 'decoder.*'], as far as they apply.",
    "skip_steps": " Write skip_steps=[[1200, 1210], [1500, 1500]], first and last step of each range, from 1 on.",
    "groups": " Write groups={'encoder': 'enc.*'}, a regular expression for each name.",
    "run_dir": " Write the path of a directory.",
}
# Names of settings in other tools, for which the nearest spelling would suggest a wrong setting or none.
_ELSEWHERE = {
    "max_grad_norm": "clip_grad_norm clip_norm clip_val clip_value gradient_clip_val gradient_clipping "
    "grad_clip max_norm",
    "clip_type": "gradient_clip_algorithm",
    "grad_log_every_n_steps": "log_every log_every_n_steps log_freq log_interval logging_steps",
    "run_dir": "log_dir output_dir save_dir",
    "backends": "loggers report_to trackers",
    "analyzers": "plugins",
    "mute": "ignore silence",
}
_LIMIT: Final = pydantic.TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)])
_OFF: Final = {"capture": "off", "fingerprints": 0}
_PATH = ("Input is not a valid path for <class 'pathlib.Path'>", "expected a path")


class Assignments:
    """Counts the assignments to settings of all configurations: a cache of settings is stale once the count differs."""

    count = 0


assignments = Assignments()


class GradientConfig(BaseModel):
    """Every setting of a manager; assigning to one during training takes effect on the next step.

    An environment variable `GRADTRACK_<SETTING>` sets what no argument does, and wins over a file or mapping.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", validate_assignment=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )

    enable_gradient_clipping: bool = Field(True, description="Clip gradients; off leaves them as they are.")
    max_grad_norm: Any = Field(
        1.0, description="The limit: a norm, one for each group or pattern, or an absolute value for clip_type value."
    )
    norm_type: float = Field(
        2.0, gt=0, allow_inf_nan=True, description="norm: the order of the norm that is limited; inf for the largest."
    )
    clip_type: ClipType = Field("norm", description="The clipping strategy.")
    agc_clip_factor: float = Field(0.01, gt=0, description="agc: the largest ratio of a unit's gradient to its weight.")
    zscore_threshold: float = Field(2.5, gt=0, description="zscore: standard deviations above the mean norm.")
    zscore_alpha: float = Field(0.97, gt=0, lt=1, description="zscore: decay of the running mean and variance.")
    adaptive_clipping: bool = Field(False, description="Clip at a percentile of recent norms; wins over clip_type.")
    adaptive_window_size: int = Field(100, ge=1, description="adaptive: how many recent norms are kept.")
    adaptive_percentile: float = Field(
        95.0, ge=0, le=100, description="adaptive: the percentile that is the limit, from 0 to 100."
    )

    enable_nan_inf_check: bool = Field(True, description="Look for non-finite gradients and act on them.")
    nonfinite_action: Action = Field("skip", description="What to do with a step whose gradients are not finite.")
    nan_inf_threshold: float = Field(
        1e-6, ge=0, le=1, description="Share of non-finite elements, from 0 to 1, that makes a step critical."
    )
    replace_nan_with: float = Field(0.0, description="replace: the value for NaN. Setting it chooses replace.")
    replace_inf_with: float = Field(1e6, gt=0, description="replace: the value for Inf, with the sign kept.")

    spike_action: SpikeAction = Field("report", description="What to do with a finite step far above those before it.")
    spike_threshold: float = Field(6.0, gt=0, description="spikes: deviations above the window of norms or losses.")
    spike_window: int = Field(128, ge=4, description="spikes: the steps that are known; half as many come first.")
    spike_robust: bool = Field(False, description="spikes: judge by median and MAD, not mean and standard deviation.")
    spike_max_in_a_row: int = Field(5, ge=1, description="spikes: how many are acted on before the next one is made.")
    spike_lr_factor: float = Field(
        1.0, gt=0, le=1, description="rollback: what the learning rates are multiplied by after it."
    )
    skip_steps: list[tuple[int, int]] = Field(
        default_factory=list, description="Steps to leave out: [first, last], a pair for each range."
    )

    enable_gradient_monitoring: bool = Field(True, description="Compute statistics, groups and health.")
    log_gradient_stats: bool = Field(True, description="Record statistics; off records health and clipping only.")
    save_gradient_plots: bool = Field(True, description="Write pictures at close, where run_dir was given.")
    save_html_report: bool = Field(False, description="Write report.html into the run's directory at close.")
    vanishing_threshold: float | None = Field(None, gt=0, description="Absolute norm below which a step vanishes.")
    exploding_threshold: float | None = Field(None, gt=0, description="Absolute norm above which a step explodes.")
    mute: list[str] = Field(
        default_factory=list, description="Issue types, layers (regex) or TYPE:layer to be silent on."
    )

    check_frequency: int = Field(1, ge=1, description="Measure fully on every Nth step.")
    max_gradient_history: int = Field(1000, ge=1, description="How many reports are kept in memory.")
    grad_log_every_n_steps: int = Field(100, ge=1, description="Send a row on every Nth step, on 1, 2, 4 ... before.")
    grad_track_per_weight_matrix: bool = Field(True, description="Measure groups of parameters, not only the whole.")
    log_histograms: bool = Field(False, description="Count the elements of each group by size for every due row.")
    track_parameters: bool = Field(
        False, description="Put every parameter's statistics into the reports, the extreme norms into the trackers."
    )
    per_rank: bool = Field(False, description="Report how the norms differ between the ranks of a sharded training.")
    groups: dict[str, str] = Field(default_factory=dict, description="Group name to a regex on parameter names.")

    backends: list[Any] = Field(default_factory=list, description="Names, {name: ..., option: ...} or instances.")
    analyzers: Literal["auto"] | list[Any] = Field(default_factory=list, description="auto, or a list like backends.")
    alerts: list[Any] = Field(
        default_factory=list, description="Where issues are posted when they open: a list like backends."
    )
    run_dir: Path | None = Field(None, description="Where the run's files go; made when the first record is.")
    capture: Literal["off", "nonfinite", "spike"] = Field(
        "off", description="Keep the first steps that break, for gradtrack replay-step: nonfinite, or spikes as well."
    )
    capture_max_steps: int = Field(3, ge=1, description="capture: how many steps are kept.")
    capture_max_bytes: int = Field(10**9, ge=1, description="capture: how many bytes they may have in all.")
    capture_optimizer: bool = Field(False, description="capture: keep the state of the optimizers, too.")
    fingerprints: int = Field(0, ge=0, description="Write hash and norm of gradients and weights every Nth step.")
    fingerprints_max_bytes: int = Field(10**8, ge=1, description="fingerprints: how many bytes they may have.")
    engine: Literal["auto", "torch", "native", "triton"] = Field(
        "auto", description="What measures: auto takes the fastest."
    )
    close_timeout_seconds: float = Field(10.0, ge=0, description="How long close waits for the trackers.")

    debug_mode: bool = Field(False, description="Log per-parameter detail and check gradtrack's own invariants.")
    verbose_logging: bool = Field(False, description="Log a line for every recorded step.")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{**_environment(), **values})
        except ValidationError as fault:
            raise readable(fault) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields:
            raise ConfigError(_unknown(name))
        try:
            super().__setattr__(name, value)
        except ValidationError as fault:
            raise readable(fault) from None
        finally:
            assignments.count += 1

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            if name == "alerts":
                value = [registry.split_spec(spec, "alert") or (type(spec).__name__,) for spec in value]
                value = [named[0] for named in value]
            yield name, redact_values(value) if name in ("backends", "analyzers") else value

    @property
    def effective_clip_type(self) -> ClipType:
        """Return the strategy in force: `adaptive_clipping` wins over `clip_type`."""
        return "adaptive" if self.adaptive_clipping else self.clip_type

    @property
    def judges_spikes(self) -> bool:
        """Whether a finite step may be left out or clipped as a spike, or because it is listed."""
        return self.spike_action != "report" or bool(self.skip_steps)

    @property
    def limits_groups(self) -> bool:
        """Whether norms of groups are limited, or norms of another order than 2, which the sums do not tell."""
        return self.effective_clip_type == "norm" and (isinstance(self.max_grad_norm, dict) or self.norm_type != 2.0)

    @classmethod
    def load(cls, source: GradientConfig | Mapping[str, Any] | str | Path | None = None, **overrides: Any) -> Self:
        """Read a configuration; where the source has a `gradtrack` mapping, that is the configuration."""
        if isinstance(source, cls):
            return source if not overrides else cls(**{**explicit(source), **overrides})
        values = read_settings(source)
        if SECTION in values and isinstance(values[SECTION] or {}, Mapping):
            values = dict(values[SECTION] or {})
        return cls(**{**values, **_environment(), **overrides})

    @classmethod
    def pick(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those entries of a training configuration that are settings of gradtrack."""
        return {name: value for name, value in values.items() if name in cls.model_fields}

    @field_validator("max_grad_norm", mode="plain")
    @classmethod
    def _check_limit(cls, value: Any) -> Any:
        """Return a limit, or a mapping of groups and patterns to limits."""
        if not isinstance(value, dict):
            return _LIMIT.validate_python(value)
        if not value:
            raise ValueError(f"expected at least one limit.{_REMEDIES['max_grad_norm']}")
        return {_checked_key(key): _checked_limit(key, limit) for key, limit in value.items()}

    @field_validator("max_grad_norm", "clip_type", "adaptive_clipping")
    @classmethod
    def _check_limit_fits(cls, value: Any, info: Any) -> Any:
        known = {**info.data, info.field_name: value}
        kind = "adaptive" if known.get("adaptive_clipping") else known.get("clip_type", "norm")
        if isinstance(known.get("max_grad_norm"), dict) and kind != "norm":
            raise ValueError(
                f"limits by group are norms, and the gradients are clipped by {kind}. "
                "Set clip_type='norm', or one number as max_grad_norm."
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _check_is_number(cls, value: Any, info: Any) -> Any:
        """Make plain containers of others, and refuse a switch as a number, which Python would count as 0 or 1."""
        value = plain(value)
        name = info.field_name
        if value is False and name in _OFF:  # as YAML reads the word off
            return _OFF[name]
        is_number = name == "max_grad_norm" or cls.model_fields[name].annotation in _NUMBERS
        return _no_switch(value, _REMEDIES.get(name, "")) if is_number else value

    @field_serializer("norm_type", when_used="json")
    def _serialize_order(self, order: float) -> float | str:
        return order if math.isfinite(order) else "inf"

    @field_validator("adaptive_percentile")
    @classmethod
    def _check_is_percentile(cls, percent: float) -> float:
        if 0 < percent < 1:
            raise ValueError(f"expected a percentile from 0 to 100. Write {round(100 * percent, 9):g} for that share.")
        return percent

    @field_validator("vanishing_threshold", "exploding_threshold")
    @classmethod
    def _check_order(cls, value: float | None, info: Any) -> float | None:
        limits = {**info.data, info.field_name: value}
        low, high = limits.get("vanishing_threshold"), limits.get("exploding_threshold")
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"expected vanishing_threshold ({low:g}) below exploding_threshold ({high:g}). "
                "Exchange them, or no norm is right."
            )
        return value

    @field_validator("groups", "mute")
    @classmethod
    def _check_patterns(cls, patterns: Any, info: Any) -> Any:
        for pattern in patterns.values() if info.field_name == "groups" else patterns:
            try:
                re.compile(pattern)
            except re.error as fault:
                raise ValueError(
                    f"{pattern!r} is not a regular expression ({fault}). Escape its special characters."
                ) from None
            if info.field_name == "mute":
                check_issue_type(pattern)
        return patterns

    @field_validator("skip_steps")
    @classmethod
    def _check_ranges(cls, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        for first, last in ranges:
            if not 1 <= first <= last:
                raise ValueError(f"[{first}, {last}] is no range of steps.{_REMEDIES['skip_steps']}")
        return ranges

    @field_validator("backends", "analyzers", "alerts", mode="before")
    @classmethod
    def _check_is_list(cls, specs: Any, info: Any) -> Any:
        name, is_plain = info.field_name, isinstance(specs, (str, Mapping))
        if (name == "analyzers" and specs == "auto") or (isinstance(specs, Iterable) and not is_plain):
            return specs
        shown = registry.shown(specs, name.removesuffix("s")) if is_plain else "..."
        auto = " or 'auto'" if name == "analyzers" else ""
        meant = "'auto'" if auto and str(specs).lower() == "auto" else f"[{shown}]"
        raise ValueError(f"expected a list{auto}. Write {name}={meant}.")

    @field_validator("backends", "analyzers", "alerts")
    @classmethod
    def _check_plugins(cls, specs: Any, info: Any) -> Any:
        for spec in [] if isinstance(specs, str) else specs:
            if spec == "auto" and info.field_name == "analyzers":
                raise ValueError("expected 'auto' alone or a list of names. Write analyzers='auto'.")
            known: registry.Registry = getattr(registry, info.field_name)
            named = registry.split_spec(spec, known.singular)
            if named is not None:
                known.check(named[0])
            elif isinstance(spec, (int, float, bytes, list, tuple, set)) or spec is None:
                shown = registry.shown(spec, known.singular)
                raise InputTypeError(
                    f"{known.singular} {shown}: expected a name, a mapping with a name, or an instance."
                )
        return specs

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(_unknown(str(name)))
        return values

    @model_validator(mode="after")
    def _choose_action(self) -> Self:
        """Choose the action `replace` where a replacement value was set and no action was."""
        chosen = self.model_fields_set
        if "nonfinite_action" not in chosen:
            replaces = bool(chosen & {"replace_nan_with", "replace_inf_with"})
            self.__dict__["nonfinite_action"] = "replace" if replaces else "skip"
        return self


PREFIX: Final = "GRADTRACK_"
"""What the name of an environment variable begins with that sets the setting named after it."""


def _environment() -> dict[str, Any]:
    """Return the settings in the environment, read as YAML; a list may be names with commas between them."""
    found: dict[str, Any] = {}
    for name, field in GradientConfig.model_fields.items():
        text = os.environ.get(f"{PREFIX}{name.upper()}", "").strip()
        if not text:
            continue
        takes_list = "list[" in str(field.annotation) and not text.startswith("[") and text != "auto"
        try:
            found[name] = text.split(",") if takes_list else text if name == "run_dir" else yaml.safe_load(text)
        except yaml.YAMLError:
            found[name] = text  # which the check of the setting refuses with what it expects
        if takes_list:
            found[name] = [entry.strip() for entry in found[name] if entry.strip()]
    return found


def explicit(config: GradientConfig) -> dict[str, Any]:
    """Return the settings that the user gave, those that equal a default included."""
    return {name: getattr(config, name) for name in config.model_fields_set}


def _unknown(name: str) -> str:
    known = next((ours for ours, others in _ELSEWHERE.items() if name.lower() in others.split()), None)
    names = [*GradientConfig.model_fields, SECTION]
    close = f" Did you mean {known!r}?" if known else registry.nearest(name, names, cutoff=0.6)
    other = close or f" Where a file holds other settings as well, put these under {SECTION!r}."
    return f"unknown setting {name!r}: expected a field of GradientConfig.{other}"


def _no_switch(value: Any, remedy: str = "") -> Any:
    """Refuse a switch as a number, which Python would count as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, not a switch.{remedy}")
    return value


def _checked_key(key: Any) -> str:
    """Return the name or the pattern that a limit is for."""
    remedy = " Write '.*' for all parameters." if key == "*" else " Escape its special characters."
    try:
        if not isinstance(key, str) or not key:
            raise TypeError("no text")
        re.compile(key)
    except (TypeError, re.error) as fault:
        raise ValueError(f"{key!r} is neither a group nor a regular expression ({fault}).{remedy}") from None
    return key


def _checked_limit(key: Any, limit: Any) -> float:
    """Return the limit of a group."""
    try:
        return _LIMIT.validate_python(_no_switch(limit))
    except ValueError:
        raise ValueError(f"{limit!r} for {key!r}: expected a number above 0. Leave out what is not to clip.") from None


def readable(fault: ValidationError) -> ConfigError:
    """Turn a validation error of pydantic into a `ConfigError` that says what was expected, without secrets."""
    lines = []
    for error in fault.errors(include_url=False):
        where = ".".join(str(part) for part in error["loc"])
        text = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected").replace(*_PATH)
        remedy = "" if error["type"] == "value_error" else _REMEDIES.get(where.partition(".")[0], "")
        end = "" if text.endswith((".", "?")) else "."
        text += f" (the environment has {PREFIX}{where.upper()})" if where in _environment() else ""
        given = "[...]" if where.partition(".")[0] == "alerts" else repr(error["input"])
        lines.append(redact(f"{where} = {given}: {text}{end}{remedy}" if where else text))
    return ConfigError("; ".join(lines))
