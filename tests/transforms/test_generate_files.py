"""The generation job's configuration: what is read, how blocks are cut, what decoding is told."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from surge_beam.policy.costs import CostModel
from surge_beam.records import EngineConfig, SurgeError
from surge_beam.transforms.generate_files import COLUMNS, GenerateConfig, read_config
from surge_beam.transforms.prompts import PromptConfig
from surge_beam.transforms.textfiles import LINE_COLUMN


def config(**settings: Any) -> GenerateConfig:
    given = {"input": "in", "output": "out", "run": "r", "prompts": PromptConfig(column="p")}
    return GenerateConfig(**given | settings)


def test_blocks_are_closed_as_soon_as_they_are_full() -> None:
    limits = config(max_rows=7, max_bytes=99).limits(CostModel(1.0, 1.0))
    assert (limits.min_rows, limits.max_rows, limits.max_bytes) == (7, 7, 99)


def test_what_is_read_of_columns() -> None:
    read = read_config(
        PromptConfig(column="p", id_column="i"), partition_by=("k",), keep_columns=("a",)
    )
    assert set(read.needed_columns) == {"p", "i"} and not read.lines
    assert (read.partition_by, read.keep_columns) == (("k",), ("a",))
    assert read.added_columns == tuple(COLUMNS.names)
    template = read_config(PromptConfig(template="{{ a }}{{ b }}"))
    assert template.needed_columns == () and template.optional_columns == ("a", "b")


def test_what_is_read_of_batch_lines() -> None:
    read = read_config(PromptConfig(), fail_on_bad_input=True)
    assert read.lines and read.needed_columns == (LINE_COLUMN,)
    assert read.added_columns == () and read.fail_on_bad_input


def test_rows_with_names_of_their_own() -> None:
    assert config(prompts=PromptConfig()).names_rows
    assert config(prompts=PromptConfig(column="p", id_column="i")).names_rows
    assert not config().names_rows


def test_rounds() -> None:
    engine = EngineConfig(model="dummy", device="cpu")
    found = config(engine=engine, rounds=3, slice_tokens=9, ranges=5, accelerator="x").round
    assert (found.engine, found.rounds, found.slice_tokens) == (engine, 3, 9)
    assert (found.ranges, found.accelerator, found.run) == (5, "x", "r")
    assert Path(found.output or "").is_absolute()
    for wrong in ({"rounds": 0}, {"slice_tokens": 0}):
        with pytest.raises(SurgeError, match="at least 1"):
            config(**wrong)


def test_paths_are_the_submitters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    found = config(input="a/*.parquet", engine=EngineConfig(model="model"))
    assert found.input == f"{tmp_path}/a/*.parquet" and found.output == f"{tmp_path}/out"
    assert found.engine.model == f"{tmp_path}/model"
    assert config(engine=EngineConfig(model="dummy")).engine.model == "dummy"


def test_a_config_travels() -> None:
    found = config(prompts=PromptConfig(template="{{ a }}"))
    assert pickle.loads(pickle.dumps(found)) == found
