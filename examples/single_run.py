"""Train a recurrent network with several time constants: python examples/single_run.py --config configs/mts.yaml.

One YAML file holds the keys of the training next to those of gradtrack; each side takes its own.
"""

import argparse
import dataclasses
from pathlib import Path

import yaml

from gradtrack import GradientConfig
from gradtrack.demo import TrainingSettings, train


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "configs" / "mts.yaml")
    values = yaml.safe_load(parser.parse_args(arguments).config.read_text(encoding="utf-8"))

    ours = GradientConfig.pick(values)
    training = {name: value for name, value in values.items() if name not in ours}
    unknown = training.keys() - {field.name for field in dataclasses.fields(TrainingSettings)}
    if unknown:
        parser.error(f"unknown keys: {', '.join(sorted(unknown))}")

    finding = train(TrainingSettings(**training), GradientConfig.load(ours))
    print(finding.describe())


if __name__ == "__main__":
    main()
