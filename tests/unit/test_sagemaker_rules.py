"""What the local SageMaker refuses, and how it words it; times, money and pages of its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from boto3.exceptions import S3UploadFailedError

from microtuning_local.sagemaker import jobs, rules
from microtuning_local.sagemaker.events import event_entry
from microtuning_local.sagemaker.faults import Faults, FaultSpec
from microtuning_local.sagemaker.locations import Location, parse_location, path_of_key
from microtuning_local.sagemaker.machine import algorithm_error
from microtuning_local.sagemaker.pool import Pool
from microtuning_local.sagemaker.sync import CheckpointMirror

if TYPE_CHECKING:
    from collections.abc import Callable

ROLE = "arn:aws:iam::000000000000:role/microtuning-local-job"


def a_request(**changes: Any) -> dict[str, Any]:
    """A request that is accepted, with members replaced; `None` leaves one out."""
    whole = {
        "TrainingJobName": "local-run-a001",
        "AlgorithmSpecification": {"TrainingImage": "local/tiny:1", "TrainingInputMode": "File"},
        "RoleArn": ROLE,
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/output"},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    }
    return {key: value for key, value in (whole | changes).items() if value is not None}


def resources(**changes: Any) -> dict[str, Any]:
    config = a_request()["ResourceConfig"] | changes
    return {"ResourceConfig": {key: value for key, value in config.items() if value is not None}}


def spot(runtime_s: int, wait_s: int | None, **changes: Any) -> dict[str, Any]:
    condition = {"MaxRuntimeInSeconds": runtime_s} | ({"MaxWaitTimeInSeconds": wait_s} if wait_s else {})
    return {"EnableManagedSpotTraining": True, "StoppingCondition": condition} | changes


def channel(name: str, uri: str, kind: str = "S3Prefix") -> dict[str, Any]:
    return {"ChannelName": name, "DataSource": {"S3DataSource": {"S3DataType": kind, "S3Uri": uri}}}


GROUPS = [{"InstanceType": "ml.m5.large", "InstanceCount": 1, "InstanceGroupName": "g"}]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"TrainingJobName": "a" * 63},
        {"HyperParameters": {f"k{n}": "v" * 2500 for n in range(100)}},
        {"Environment": {f"K{n}": "v" * 512 for n in range(100)}},
        {"Tags": [{"Key": f"team {n}", "Value": "Größe/1"} for n in range(50)]},
        {"StoppingCondition": {"MaxRuntimeInSeconds": 28 * 86_400}},
        {"StoppingCondition": None},
        spot(3600, 3600),
        resources(KeepAlivePeriodInSeconds=3600),
        resources(VolumeKmsKeyId="key"),
        resources(InstanceType=None, InstanceCount=None, InstanceGroups=GROUPS),
        {"InputDataConfig": [channel("train", "s3://bucket/train/"), channel("eval", "s3://bucket/eval.jsonl")]},
    ],
)
def test_a_valid_request_is_accepted(changes: dict[str, Any]) -> None:
    rules.check_create(a_request(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TrainingJobName": "a" * 64}, "Member must have length less than or equal to 63"),
        ({"TrainingJobName": "-lead"}, "regular expression pattern: [a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"),
        ({"TrainingJobName": "my_team"}, "'trainingJobName'"),
        ({"RoleArn": None}, "'roleArn' failed to satisfy constraint: Member must not be null"),
        ({"HyperParameters": {f"k{n}": "1" for n in range(101)}}, "less than or equal to 100"),
        ({"HyperParameters": {"k" * 257: "1"}}, "less than or equal to 256"),
        ({"HyperParameters": {"k": "v" * 2501}}, "less than or equal to 2500"),
        ({"HyperParameters": {"k": "two\nlines"}}, "regular expression pattern: .*"),
        ({"Environment": {f"K{n}": "1" for n in range(101)}}, "less than or equal to 100"),
        ({"Environment": {"K" * 513: "1"}}, "less than or equal to 512"),
        ({"Environment": {"K": "v" * 513}}, "less than or equal to 512"),
        ({"Environment": {"bad-name": "x"}}, "[a-zA-Z_][a-zA-Z0-9_]*"),
        ({"Environment": {"TRAINING_JOB_NAME": "x"}}, "reserved by SageMaker"),
        ({"Tags": [{"Key": f"k{n}", "Value": ""} for n in range(51)]}, "less than or equal to 50"),
        (resources(InstanceType="ml.p9.large"), "Member must satisfy enum value set"),
        (resources(InstanceCount=0), "InstanceCount must be greater than or equal to 1"),
        (resources(VolumeSizeInGB=None), "VolumeSizeInGB must be greater than or equal to 1"),
        (resources(InstanceGroups=GROUPS), "exactly one of InstanceType, InstanceGroups and InstancePreferences"),
        ({"ResourceConfig": None}, "exactly one of InstanceType, InstanceGroups and InstancePreferences"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 0}}, "greater than or equal to 1"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 28 * 86_400 + 1}}, "28 days"),
        (resources(InstanceType="ml.g5.xlarge", VolumeKmsKeyId="key"), "VolumeKmsKeyId is not supported"),
        (spot(60, None), "Missing MaxWaitTimeInSeconds"),
        (spot(60, 59), "greater than or equal to MaxRuntimeInSeconds"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60}}, "set to false"),
        (spot(60, 60) | resources(KeepAlivePeriodInSeconds=60), "KeepAlivePeriodInSeconds is not supported"),
        (
            resources(InstanceType=None, InstanceCount=None, InstanceGroups=GROUPS, KeepAlivePeriodInSeconds=60),
            "heterogeneous",
        ),
        (
            spot(60, 60)
            | resources(InstanceType=None, InstanceCount=None, InstancePreferences=[{"InstanceType": "ml.m5.large"}]),
            "InstancePreferences is not supported",
        ),
        (resources(KeepAlivePeriodInSeconds=21_601), "less than or equal to 21600"),
        ({"OutputDataConfig": {"S3OutputPath": "file:///tmp"}}, "(https|s3)://"),
        ({"OutputDataConfig": {"S3OutputPath": "s3://Bad_Bucket/x"}}, "not a valid S3 URI"),
        ({"CheckpointConfig": {"S3Uri": "s3://B/x"}}, "CheckpointConfig.S3Uri is not a valid S3 URI"),
        ({"CheckpointConfig": {"LocalPath": "/opt/ml/checkpoints"}}, "'checkpointConfig.s3Uri'"),
        ({"CheckpointConfig": {"S3Uri": "s3://bucket/x", "LocalPath": "/opt/ml/../../etc"}}, "below /opt/ml"),
        ({"InputDataConfig": [channel("a", "s3://bucket/x"), channel("a", "s3://bucket/y")]}, "Duplicate channel"),
        ({"InputDataConfig": [channel("a", "s3://bucket/x", "ManifestFile")]}, "S3Prefix channels only"),
        ({"AlgorithmSpecification": {"TrainingInputMode": "File"}}, "Exactly one of TrainingImage"),
    ],
)
def test_a_request_that_cannot_work_is_refused_in_the_services_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(rules.Refusal) as refused:
        rules.check_create(a_request(**changes))
    assert refused.value.code == "ValidationException"
    assert words in refused.value.message


def test_two_broken_constraints_are_told_at_once() -> None:
    with pytest.raises(rules.Refusal, match="2 validation errors detected"):
        rules.check_create(a_request(TrainingJobName="-", Environment={"bad-name": "x"}))


@pytest.mark.parametrize(
    ("prefix", "key", "path"),
    [
        ("data/train.jsonl", "data/train.jsonl", "train.jsonl"),
        ("data/", "data/a/b.jsonl", "a/b.jsonl"),
        ("data", "data/a/b.jsonl", "a/b.jsonl"),
        ("data/part", "data/part-1.jsonl", "part-1.jsonl"),
        ("", "top.jsonl", "top.jsonl"),
        ("data/", "data/", None),
        ("data/", "data/../../etc/passwd", None),
        ("data/", "data//etc/passwd", None),
    ],
)
def test_an_object_lands_where_sagemaker_puts_it(prefix: str, key: str, path: str | None) -> None:
    assert path_of_key(prefix, key) == path


def test_a_location_below_a_prefix_has_one_slash_between() -> None:
    assert parse_location("s3://b/x/").under("job", "output").uri == "s3://b/x/job/output"
    assert Location("b", "l01").under("").key == "l01/"
    assert parse_location("s3://b").under("job").key == "job"


def a_job(**changes: Any) -> jobs.Job:
    job = jobs.new_job(a_request(**changes), "arn:aws:sagemaker:us-east-1:000000000000:training-job/x", 1000.0)
    jobs.moved(job, "InProgress", "Starting", 1000.0)
    return job


def test_interrupted_time_is_not_billed_and_spot_is_billed_at_30_percent() -> None:
    job = a_job(**spot(3600, 7200))
    job.segments = [[1010.0, 1020.0], [1100.0, None]]
    jobs.moved(job, "Completed", "Completed", 1110.5)
    # 10 s before the interruption and 10.5 s after it; 30 % of 21 s is 6.3 s.
    assert jobs.seconds(job, 2000.0) == {"TrainingTimeInSeconds": 21, "BillableTimeInSeconds": 7}


def test_a_job_that_never_got_a_machine_has_no_times_at_all() -> None:
    job = a_job()
    job.failure_reason = jobs.CAPACITY_ERROR
    jobs.moved(job, "Failed", "Failed", 1001.0)
    told = jobs.description(job, 1002.0)
    assert not {"TrainingStartTime", "TrainingEndTime", "BillableTimeInSeconds", "TrainingTimeInSeconds"} & set(told)


def test_a_spot_job_that_waited_in_vain_is_billed_0_seconds() -> None:
    job = a_job(**spot(60, 60))
    jobs.moved(job, "Stopped", "MaxWaitTimeExceeded", 1061.0)
    assert jobs.description(job, 1062.0)["BillableTimeInSeconds"] == 0


def test_an_event_has_milliseconds_and_tags_as_a_map() -> None:
    job = a_job(Tags=[{"Key": "stage", "Value": "local"}])
    entry = event_entry(job, 1000.0)
    detail = json.loads(entry["Detail"])
    assert (entry["Source"], entry["DetailType"]) == ("local.sagemaker", "SageMaker Training Job State Change")
    assert entry["Resources"] == [job.arn]
    assert detail["CreationTime"] == 1_000_000
    assert detail["SecondaryStatusTransitions"][0]["StartTime"] == 1_000_000
    assert detail["Tags"] == {"stage": "local"}
    assert "BillableTimeInSeconds" not in detail


def test_pages_of_a_list_cover_every_job_once() -> None:
    every = [jobs.new_job(a_request(TrainingJobName=f"job-{n:02}"), f"arn/{n}", float(n)) for n in range(25)]
    seen, token = [], None
    for _ in range(3):
        page = jobs.listed(every, {"MaxResults": 10, "NextToken": token, "SortBy": "Name", "SortOrder": "Descending"})
        seen += [row["TrainingJobName"] for row in page["TrainingJobSummaries"]]
        token = page.get("NextToken")
    assert seen == [f"job-{n:02}" for n in reversed(range(25))]
    assert token is None


def test_a_list_can_be_narrowed() -> None:
    every = [jobs.new_job(a_request(TrainingJobName=f"job-{n}"), f"arn/{n}", float(n)) for n in range(5)]
    jobs.moved(every[3], "Failed", "Failed", 10.0)
    names = [row["TrainingJobName"] for row in jobs.listed(every, {"StatusEquals": "Failed"})["TrainingJobSummaries"]]
    later = jobs.listed(every, {"CreationTimeAfter": 3.0, "NameContains": "JOB"})["TrainingJobSummaries"]
    assert names == ["job-3"]
    assert [row["TrainingJobName"] for row in later] == ["job-3", "job-4"]


def test_a_long_failure_text_gives_way_to_the_exit_code() -> None:
    reason = algorithm_error("x" * 2000, 137)
    assert len(reason) == 1024
    assert reason.startswith("AlgorithmError: xxx")
    assert reason.endswith(", exit code: 137")


class RecordingS3:
    """Remembers the keys it was given, in order; `on_upload` may do something first, as a job would meanwhile."""

    def __init__(self, on_upload: Callable[[str], None] = lambda key: None) -> None:
        self.keys: list[str] = []
        self.on_upload = on_upload

    def upload_file(self, path: str, bucket: str, key: str, **_: Any) -> None:
        self.on_upload(key)
        Path(path).read_bytes()
        self.keys.append(key)


def write_checkpoint(folder: Path, step: int) -> None:
    (folder / f"step-{step}").mkdir()
    for name in ("manifest.json", "a.bin", "z.bin", ".hidden", "half.tmp"):
        (folder / f"step-{step}" / name).write_text(name)


def test_a_manifest_is_mirrored_after_the_files_beside_it(tmp_path: Path) -> None:
    mirror = CheckpointMirror(s3 := RecordingS3(), tmp_path, Location("b", "l01/"))
    write_checkpoint(tmp_path, 1)
    mirror.sweep()
    assert s3.keys == ["l01/step-1/a.bin", "l01/step-1/z.bin", "l01/step-1/manifest.json"]
    mirror.sweep()
    assert len(s3.keys) == 3
    (tmp_path / "step-1" / "a.bin").write_text("changed")
    mirror.sweep()
    assert s3.keys[3:] == ["l01/step-1/a.bin"]


def test_a_checkpoint_that_is_pruned_meanwhile_gets_no_manifest(tmp_path: Path) -> None:
    gone = tmp_path / "step-1" / "z.bin"
    s3 = RecordingS3(lambda key: gone.unlink(missing_ok=True))
    mirror = CheckpointMirror(s3, tmp_path, Location("b", "l01/"))
    write_checkpoint(tmp_path, 1)
    write_checkpoint(tmp_path, 2)
    mirror.sweep()
    assert s3.keys == ["l01/step-1/a.bin", "l01/step-2/a.bin", "l01/step-2/z.bin", "l01/step-2/manifest.json"]


def test_a_file_that_is_written_to_while_it_is_read_goes_with_the_next_sweep_and_its_manifest_too(
    tmp_path: Path,
) -> None:
    written = tmp_path / "step-1" / "a.bin"
    write_checkpoint(tmp_path, 1)

    def writes(key: str) -> None:
        if key == "l01/step-1/a.bin" and written.read_text() != "longer than before":
            written.write_text("longer than before")
            raise S3UploadFailedError("An error occurred (BadDigest) when calling the PutObject operation")

    s3 = RecordingS3(writes)
    mirror = CheckpointMirror(s3, tmp_path, Location("b", "l01/"))
    mirror.sent.clear()
    mirror.sweep()
    assert s3.keys == ["l01/step-1/z.bin"]
    mirror.sweep()
    assert s3.keys == ["l01/step-1/z.bin", "l01/step-1/a.bin", "l01/step-1/manifest.json"]


def test_what_s3_refuses_of_a_file_at_rest_is_raised(tmp_path: Path) -> None:
    def refuses(key: str) -> None:
        raise S3UploadFailedError("An error occurred (AccessDenied) when calling the PutObject operation")

    mirror = CheckpointMirror(RecordingS3(refuses), tmp_path, Location("b", "l01/"))
    write_checkpoint(tmp_path, 1)
    with pytest.raises(S3UploadFailedError, match="AccessDenied"):
        mirror.sweep()


def test_what_was_restored_stays_and_what_a_quick_job_wrote_before_the_first_sweep_goes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    mirror = CheckpointMirror(s3 := RecordingS3(), tmp_path, Location("b", "l01/"))
    write_checkpoint(tmp_path, 2)
    mirror.start()
    mirror.close()
    assert s3.keys == ["l01/step-2/a.bin", "l01/step-2/z.bin", "l01/step-2/manifest.json"]


def test_a_refusal_is_given_as_often_as_asked() -> None:
    faults = Faults()
    faults.replace(FaultSpec.model_validate({"refuse_creates": {"code": "ThrottlingException", "count": 2}}))
    answers = [faults.refusal("ml.m5.large", 1) for _ in range(3)]
    assert [answer and (answer.code, answer.message) for answer in answers] == [
        ("ThrottlingException", "Rate exceeded"),
        ("ThrottlingException", "Rate exceeded"),
        None,
    ]


def test_a_pool_gives_no_more_machines_than_it_has(tmp_path: Path) -> None:
    pool = Pool(3, Faults(FaultSpec(capacity={"ml.g5.xlarge": 1})), jobs.Jobs(tmp_path))
    assert pool.take(a_job(**resources(InstanceType="ml.g5.xlarge", InstanceCount=2))) is None
    assert not pool.can_ever_hold(["ml.g5.xlarge"], 2)
    preferences = [{"InstanceType": each, "InstanceCount": 2} for each in ("ml.g5.xlarge", "ml.m5.large")]
    either = a_job(**resources(InstanceType=None, InstanceCount=None, InstancePreferences=preferences))
    assert pool.take(either) == "ml.m5.large"
    assert pool.take(a_job(**resources(InstanceType="ml.g5.xlarge"))) == "ml.g5.xlarge"
    assert pool.take(a_job()) is None
    pool.leave(either, "ml.m5.large")
    assert pool.take(a_job(**resources(InstanceCount=2))) == "ml.m5.large"
