"""The environment's table: what is read, what is refused, who is believed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import inside
from loops import each
from unisono.engine.environment import env

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "environment.md"


def test_defaults() -> None:
    settings = env.read({})
    assert settings == env.Settings()
    assert (settings.timeout_s, settings.staging_bytes, settings.spin_us) == (300.0, 1 << 20, -1)
    assert settings.rank is None
    assert settings.origin("timeout_s") == "default"
    with pytest.raises(AttributeError):
        settings.rank = 1  # type: ignore[misc]


def test_the_usual_variables() -> None:
    settings = env.read(
        {
            "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
            "MASTER_ADDR": " host ", "MASTER_PORT": "29500", "UNISONO_TIMEOUT_S": "2.5",
            "UNISONO_STAGING_BYTES": "8M", "UNISONO_SPIN_US": "50", "UNISONO_STATUS_FD": "7:12",
            "UNISONO_STORE": "127.0.0.1:29501",
        }
    )  # fmt: skip
    assert (settings.rank, settings.world_size, settings.local_rank, settings.local_world_size) == (
        3,
        8,
        1,
        2,
    )
    assert (settings.master_addr, settings.master_port, settings.group_rank) == ("host", 29500, 1)
    assert (settings.timeout_s, settings.staging_bytes, settings.spin_us) == (2.5, 8 << 20, 50)
    assert (settings.status_fd, settings.store_address, settings.launcher) == (
        (7, 12),
        ("127.0.0.1", 29501),
        "unisono run",
    )
    assert settings.origin("rank") == "RANK"


@each(
    ("name", "value", "right"),
    [
        ("RANK", "two", "whole number from 0"),
        ("RANK", "-1", "whole number from 0"),
        ("RANK", "1.0", "whole number"),
        ("WORLD_SIZE", "0", "whole number from 1"),
        ("MASTER_PORT", "29k", "from 1 to 65535"),
        ("MASTER_PORT", "65536", "from 1 to 65535"),
        ("UNISONO_TIMEOUT_S", "0", "above 0"),
        ("UNISONO_TIMEOUT_S", "nan", "above 0"),
        ("UNISONO_TIMEOUT_S", "soon", "above 0"),
        ("UNISONO_STAGING_BYTES", "4X", "4194304, 4M or 4MiB"),
        ("UNISONO_STAGING_BYTES", "4iB", "4194304, 4M or 4MiB"),
        ("UNISONO_STORE", "nowhere", "host:port"),
        ("UNISONO_SPIN_US", "-2", "from -1"),
    ],
)
def test_a_malformed_variable_is_named_with_what_is_right(name: str, value: str, right: str) -> None:
    with pytest.raises(ValueError, match=right) as caught:
        env.read({name: value})
    assert str(caught.value).startswith(f"{name} is malformed: got {value!r}, expected ")


@each(
    ("variables", "setting", "text"),
    [
        ({"MASTER_PORT": "0"}, "master_port", "MASTER_PORT is malformed: got '0'"),
        ({"LOCAL_RANK": "-1"}, "local_rank", "LOCAL_RANK is malformed: got '-1'"),
        ({"RANK": "1", "SLURM_PROCID": "2"}, "rank", "RANK=1 and SLURM_PROCID=2 disagree"),
        ({"RANK": "x", "SLURM_PROCID": "2"}, "rank", "RANK is malformed"),
    ],
)
def test_of_other_programs_variables_only_what_is_used_is_checked(
    variables: dict[str, str], setting: str, text: str
) -> None:
    settings = env.read(variables, strict=False)
    assert settings.timeout_s == 300.0
    with pytest.raises(ValueError, match=text):
        getattr(settings, setting)
    with pytest.raises(ValueError, match="UNISONO_SPIN_US is malformed"):
        env.read({**variables, "UNISONO_SPIN_US": "x"}, strict=False)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert env.read({variable.name: "" for variable in env.VARIABLES}) == env.Settings()


LAUNCHERS = [
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH/PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
]


@each(("launcher", "rank", "size", "local"), LAUNCHERS)
def test_each_launcher_is_read(launcher: str, rank: str, size: str, local: str) -> None:
    settings = env.read({rank: "2", size: "4", local: "0"})
    assert (settings.rank, settings.world_size, settings.local_rank) == (2, 4, 0)
    assert settings.launcher == launcher
    assert settings.origin("rank") == rank


@each(("launcher", "rank", "size", "local"), LAUNCHERS)
def test_two_sources_that_disagree_are_both_named(launcher: str, rank: str, size: str, local: str) -> None:
    assert env.read({"RANK": "2", rank: "2"}).rank == 2
    with pytest.raises(ValueError, match=f"RANK=1 and {rank}=2 disagree.*set by {launcher}"):
        env.read({"RANK": "1", rank: "2"})
    with pytest.raises(ValueError, match=f"WORLD_SIZE=8 and {size}=4 disagree"):
        env.read({"WORLD_SIZE": "8", rank: "2", size: "4"})


def test_kubernetes() -> None:
    settings = env.read(
        {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    )
    assert (settings.rank, settings.world_size, settings.kubernetes) == (1, 2, True)
    with pytest.raises(ValueError, match="RANK=0 and JOB_COMPLETION_INDEX=1 disagree"):
        env.read({"JOB_COMPLETION_INDEX": "1", "RANK": "0"})


@each("inner", [{"UNISONO_STORE": "127.0.0.1:29501"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_a_launcher_inside_a_batch_job_is_believed(inner: dict[str, str]) -> None:
    settings = env.read({**inner, "RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    assert (settings.rank, settings.world_size) == (3, 4)


def test_mpi_inside_slurm_is_believed() -> None:
    settings = env.read({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "nonsense"})
    assert settings.rank == 3


def test_torchrun() -> None:
    settings = env.read(
        {
            "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "2",
        }
    )
    assert (settings.job_id, settings.agent_store, settings.restart_count) == ("x", True, 2)
    assert not env.read({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


@each(
    ("text", "nbytes"),
    [("0", 0), ("4194304", 4 << 20), ("8M", 8 << 20), ("4MiB", 4 << 20), (" 1 g", 1 << 30), ("2kib", 2048)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert env.parse_size(text) == nbytes


@given(name=st.sampled_from([variable.name for variable in env.VARIABLES]), value=st.text(max_size=12))
def test_any_text_is_a_value_or_an_error_naming_the_variable(name: str, value: str) -> None:
    try:
        env.read({name: value})
    except ValueError as error:
        assert str(error).startswith(f"{name} is malformed")


def test_every_setting_is_in_the_listing_and_every_variable_in_the_documentation() -> None:
    listed = {name: (value, origin) for name, value, origin in env.listing(env.read({"RANK": "1"}))}
    assert listed["rank"] == ("1", "RANK")
    assert {variable.setting for variable in env.VARIABLES} == set(listed)
    assert all(f"`{variable.name}`" in env.markdown() for variable in env.VARIABLES)


def test_the_page_names_every_variable_once() -> None:
    rows = [line.split("`")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows)), "a variable has two rows"
    assert "UNISONO_TIMEOUT_S" in rows


def test_a_variable_is_declared_once() -> None:
    one, other = (
        env.EnvironmentVariable("A", "rank", int, "one"),
        env.EnvironmentVariable("B", "rank", int, "the other"),
    )
    assert inside.table(one, other) == (one, other)
    with pytest.raises(ValueError, match="declared twice.*A"):
        inside.table(one, other, one._replace(doc="the same"))


def test_the_documentation_is_current() -> None:
    assert DOCS.read_text() == env.markdown(), "write env.markdown() to docs/reference/environment.md"


def test_a_copy_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    copied = env.copy()
    copied["RANK"] = "6"
    assert env.read().rank == 5


def test_what_is_replaced_is_read_alone() -> None:
    assert env.replaced_backend({}) == ""
    assert env.replaced_backend({"UNISONO_REPLACE": " Gloo ", "RANK": "nonsense"}) == "gloo"
    assert env.read({"UNISONO_REPLACE": "gloo"}).replace == "gloo"
    with pytest.raises(ValueError, match="UNISONO_REPLACE is malformed: got 'nccl', expected gloo"):
        env.replaced_backend({"UNISONO_REPLACE": "nccl"})
