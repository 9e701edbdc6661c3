#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The keys of DeepSpeed's own configuration classes with their defaults, for tests/unit/config_keys_test.cc.

    python3 tests/golden/make_deepspeed_keys.py     # needs deepspeed; some seconds

deepspeed_keys.json is a list of [path, default]: of every field of the classes that DeepSpeed reads with pydantic. What
it reads by hand, key by key, has no such list.
"""

import enum
import json
import pathlib
import types
import typing

import pydantic
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import HybridEngineConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

SECTIONS = {
    "zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config,
    "comms_logger": CommsLoggerConfig, "tensorboard": TensorBoardConfig, "csv_monitor": CSVConfig, "wandb": WandbConfig,
    "comet": CometConfig, "compile": CompileConfig, "timers.throughput": DeepSpeedThroughputTimerConfig,
    "hybrid_engine": HybridEngineConfig, "tensor_parallel": TPTrainingConfig,
}
OUT = pathlib.Path(__file__).parent / "deepspeed_keys.json"


def model_of(annotation):
    """The class of a section inside a section, or None."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((m for m in map(model_of, typing.get_args(annotation)) if m), None)
    return None


def plain(value):
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    return value


def keys(prefix, cls):
    for name, field in cls.model_fields.items():
        path = f"{prefix}.{field.alias or name}"
        inner = model_of(field.annotation)
        if inner is not None:
            yield from keys(path, inner)
            continue
        default = plain(field.get_default(call_default_factory=True))
        try:
            json.dumps(default)
        except TypeError:
            default = None
        yield [path, default]


def main():
    rows = [row for section, cls in SECTIONS.items() for row in keys(section, cls)]
    OUT.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{OUT}: {len(rows)} keys")


if __name__ == "__main__":
    main()
