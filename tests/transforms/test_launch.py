"""Which arguments a job takes, which it leaves to Beam, and which it refuses."""

from __future__ import annotations

import argparse
import pickle

import pytest
from apache_beam.options.pipeline_options import GoogleCloudOptions, StandardOptions

from pipelines import embed_corpus, generate_corpus
from surge_beam.records import RefusedError
from surge_beam.transforms.launch import _JobOptions, names, parse

OURS = ["--input", "in", "--output", "out"]


@pytest.mark.parametrize("pipeline", [embed_corpus, generate_corpus])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["b.parquet", "c.parquet"], ["'b.parquet'", "quotes"]),
        (["--runner=FnApiRunner", "b.parquet"], ["'b.parquet'", "quotes"]),
        (["--runner=DataflowRunner", "b.parquet"], ["'b.parquet'", "quotes"]),
        (["--partition-by", "k"], ["--partition-by", "mean --partition_by"]),
        (["--on-bad-input=fail"], ["--on-bad-input", "mean --on_bad_input"]),
        (["--partition_bye=k"], ["mean --partition_by"]),
        (["--over"], ["no option --over"]),
        (["--directrunner_num_workers=2"], ["mean --direct_num_workers"]),
        (["--quite_unknown", "value"], ["no option --quite_unknown"]),
        (["-x"], ["no option -x"]),
        (["--runner=FlinkRunner", "--partition-by=k"], ["mean --partition_by"]),
    ],
)
def test_what_neither_knows_is_refused(pipeline, arguments, words):
    with pytest.raises(RefusedError) as refused:
        parse(pipeline.parser(), [*OURS, *arguments])
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--runner=PrismRunner", "--environment_type", "LOOPBACK"],
        ["--direct_num_workers", "2", "--direct_running_mode=multi_processing"],
        # a job server's own, which only it knows
        ["--runner=FlinkRunner", "--flink_master", "host:8081", "--parallelism", "4"],
        ["--runner", "PortableRunner", "--quite_unknown", "value", "--other=1"],
        ["--runner=DataflowRunner", "--project", "p", "--region=r", "--experiments=a,b"],
    ],
)
def test_beams_own_are_left_to_it(arguments):
    args, rest = parse(embed_corpus.parser(), [*OURS, *arguments, "--truncate_dim", "4"])
    assert rest == arguments
    assert (args.input, args.truncate_dim) == ("in", 4)


def test_names():
    assert names("a,b") == ("a", "b")
    assert names(" a, b ,") == ("a", "b")
    assert names("") == ()
    with pytest.raises(argparse.ArgumentTypeError, match="'b' occurs more than once"):
        names("b,a, b")


def test_a_view_of_the_options_is_parsed_once() -> None:
    options = _JobOptions(["--runner=FnApiRunner", "--impersonate_service_account=someone"])
    standard, cloud = options.view_as(StandardOptions), options.view_as(GoogleCloudOptions)
    assert options.view_as(StandardOptions) is standard
    standard.runner = "PrismRunner"
    assert options.get_all_options()["runner"] == cloud.get_all_options()["runner"] == "PrismRunner"
    # as Beam has it: what travels does not say on whose behalf the job was submitted
    travelled = pickle.loads(pickle.dumps(options))
    assert travelled.view_as(StandardOptions).runner == "PrismRunner"
    assert travelled.view_as(GoogleCloudOptions).impersonate_service_account is None
    assert cloud.impersonate_service_account == "someone"
