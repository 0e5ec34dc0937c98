"""The page of settings: every field of `GradientConfig`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from gradtrack import GradientConfig
from reference.markdown import code, table

_HEAD = """# Configuration

A `GradientConfig` is made from keywords, a mapping, or a YAML, TOML or JSON file. Where the source has a mapping
`gradtrack`, that one is taken, so that the settings can live in the configuration of the training:

```yaml
learning_rate: 0.001
gradtrack:
  backends: [tensorboard, {name: mlflow, experiment: exp1}]
  analyzers: auto
  max_grad_norm: 1.0
```

Only settings that differ from their defaults need to be written. Every setting may be changed while a training runs,
and the next step goes by it. An unknown key is an error that names the nearest field.

```python
from gradtrack import GradientConfig, GradientManager

config = GradientConfig(max_grad_norm=1.0)
manager = GradientManager(config, check_frequency=10)
manager.config.max_grad_norm *= 0.5
```

Containers of OmegaConf, Hydra and ml_collections, and any other mapping, work everywhere a dictionary does, at every
depth: `GradientManager(cfg.gradtrack)`. One file `gradtrack.yaml` with the settings below the key `gradtrack` serves
all: `GradientManager("gradtrack.yaml")`, the argument `config` of Lightning's callback, and the list of
defaults of a Hydra program.

## The environment

`GRADTRACK_<SETTING>` sets a setting without a change of code or file, for one run of a sweep for example:

    GRADTRACK_MAX_GRAD_NORM=0.5 GRADTRACK_BACKENDS=mlflow,tensorboard python train.py

The value is read as YAML; a list may also be names with commas between them. Of these the first that sets a setting
wins:

1. an argument: a keyword, or a field of a `GradientConfig` that you made;
2. the environment;
3. a file or mapping;
4. the default.
"""
_GROUPS = {
    "Clipping": r"enable_gradient_clipping|max_grad_norm|norm_type|clip_type|agc_|zscore_|adaptive_",
    "Values that are not finite": r"enable_nan_inf|nonfinite|nan_inf|replace_",
    "Spikes": r"spike_|skip_steps",
    "What is measured and judged": r"enable_gradient_mon|check_|max_gradient_|grad_track|track_|groups|.*ing_thr|mute",
    "What is recorded": r"grad_log|log_|save_|backends|analyzers|alerts|run_dir|close_",
    "How it runs": "",
}
_TAKES = {"max_grad_norm": "number, > 0, or a mapping to such"}
"""What settings take whose annotation does not tell."""


def page() -> str:
    """Return the page."""
    fields = GradientConfig.model_fields
    groups: dict[str, list[str]] = {title: [] for title in _GROUPS}
    for name in fields:
        title = next(title for title, pattern in _GROUPS.items() if re.match(pattern, name))
        groups[title].append(name)
    parts = [_HEAD]
    for title, found in groups.items():
        rows = [
            (code(name), _values(name, fields[name]), _default(fields[name]), fields[name].description or "")
            for name in found
        ]
        parts.append(f"\n## {title}\n\n{table(('setting', 'takes', 'default', 'meaning'), rows)}")
    return "".join(parts)


def _values(name: str, field: Any) -> str:
    if name in _TAKES:
        return _TAKES[name]
    limits = [
        f"{sign} {getattr(rule, kind):g}"
        for rule in field.metadata
        for kind, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if hasattr(rule, kind)
    ]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(map(code, inner))
    if origin in (list, dict):
        return "list" if origin is list else "mapping"
    if inner:
        return " or ".join(_kind(one) for one in inner if one is not type(None))
    return {bool: "true or false", int: "integer", float: "number", Path: "path"}.get(annotation, "text")


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return code(field.default_factory())
    if field.default is None:
        return "unset"
    return code(str(field.default).lower() if isinstance(field.default, bool) else field.default)
