"""An environment variable never changes a locked value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.env import HARMLESS, INFLUENCES, influence, refuse_influences
from config.errors import Exit, UsageError
from config.lock import Lock

LOCKED = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
PLAIN = [
    "PATH",
    "HOME",
    "LANG",
    "HF_HOME",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
    "SOL_HOME",
]


SAME_GPUS = [("CUDA_VISIBLE_DEVICES", devices) for devices in ("0", "0,1", "0,1,2", "0,1,2,3")]
"""Lists of devices that pick none but the first."""


def make_lock(env: dict[str, str], kind: str = "cuda") -> Lock:
    values = {"env": env, "hardware": {"kind": kind}}
    return Lock(target="fixture", digest="0" * 64, base_digest="0" * 64, values=values)


@pytest.mark.parametrize(
    "name",
    [
        "H3_SEED",
        "SOL_ATTN_TAU",
        "SGLANG_CACHE_DIT_ENABLED",
        "SGLANG_DIFFUSION_ATTENTION_BACKEND",
        "MINIMAX_H3_TORCH_SDPA_BACKEND",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCH_COMPILE_DISABLE",
        "TORCHDYNAMO_DISABLE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TRITON_INTERPRET",
        "NCCL_P2P_DISABLE",
        "CUDA_LAUNCH_BLOCKING",
        "NVIDIA_TF32_OVERRIDE",
        "MKL_NUM_THREADS",
        "LD_PRELOAD",
        "PYTHONPATH",
        "PYTHONHOME",
        "CUDA_VISIBLE_DEVICES",
    ],
)
def test_names_what_would_change_the_run(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_influences({"PATH": "/bin", name: "s3cret"}, make_lock(LOCKED))
    assert name in caught.value.found
    assert caught.value.exit_code == Exit.USAGE
    assert f"unset {name}" in caught.value.remedy and f"--set env.{name}=" in caught.value.remedy
    assert "s3cret" not in str(caught.value)


def test_a_cpu_target_locks_no_threads_but_everything_else() -> None:
    """Machines whose processor an old OpenBLAS misjudges set OPENBLAS_CORETYPE for every program."""
    refuse_influences({"OPENBLAS_CORETYPE": "Haswell", "OMP_NUM_THREADS": "2"}, make_lock({}, "cpu"))
    for name in ("SGLANG_CACHE_DIT_ENABLED", "LD_PRELOAD", "SOL_ATTN_TAU"):
        with pytest.raises(UsageError, match=name):
            refuse_influences({name: "1"}, make_lock({}, "cpu"))
    with pytest.raises(UsageError, match="OMP_NUM_THREADS"):
        refuse_influences({"OMP_NUM_THREADS": "2"}, make_lock({"OMP_NUM_THREADS": "1"}, "cpu"))


@pytest.mark.parametrize("devices", ["1", "1,0", "0,2", "0,1,3", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "-1", ""])
def test_other_gpus_than_those_that_are_watched_are_refused(devices: str) -> None:
    """NVML counts from the first GPU of the machine, whatever CUDA is shown."""
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES: picks other GPUs"):
        refuse_influences({"CUDA_VISIBLE_DEVICES": devices}, make_lock({}))
    refuse_influences({"CUDA_VISIBLE_DEVICES": devices}, make_lock({}, "cpu"))


@pytest.mark.parametrize(("name", "devices"), SAME_GPUS)
def test_slurm_names_the_gpus_that_would_be_taken_anyway(name: str, devices: str) -> None:
    refuse_influences({name: devices}, make_lock({}))


def test_every_offender_is_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        refuse_influences({"NCCL_DEBUG": "INFO", "H3_SEED": "1", "HOME": "/"}, make_lock({}))
    assert "unset H3_SEED NCCL_DEBUG;" in caught.value.remedy
    assert "HOME" not in str(caught.value)


@pytest.mark.parametrize("name", [*PLAIN, *HARMLESS])
def test_places_and_credentials_pass(name: str) -> None:
    refuse_influences({name: "anything"}, make_lock(LOCKED))


def test_every_exception_is_one() -> None:
    """A name in HARMLESS that no pattern would catch is a leftover."""
    from fnmatch import fnmatchcase

    assert all(any(fnmatchcase(name, pattern) for pattern in INFLUENCES) for name in HARMLESS)


def test_the_locked_value_passes_and_another_does_not() -> None:
    refuse_influences(dict(LOCKED), make_lock(LOCKED))
    with pytest.raises(UsageError, match="OMP_NUM_THREADS: the lock sets it to '1'"):
        refuse_influences({"OMP_NUM_THREADS": "2"}, make_lock(LOCKED))


def test_a_variable_of_the_lock_alone_is_compared_too() -> None:
    """`--set env.NAME=...` may lock a variable that no pattern knows."""
    assert influence("ANYTHING") is None
    with pytest.raises(UsageError, match="ANYTHING"):
        refuse_influences({"ANYTHING": "1"}, make_lock({"ANYTHING": "2"}))


names = st.one_of(
    st.sampled_from(PLAIN),
    st.sampled_from(sorted(HARMLESS)),
    st.sampled_from(sorted(INFLUENCES)).map(lambda pattern: pattern.replace("*", "X")),
    st.text("ABCDEFHMNOPRSTX_0123", min_size=1, max_size=12),
)
environments = st.dictionaries(names, st.sampled_from(["", "0", "1", "false"]), max_size=8)


@given(environ=environments, locked=environments)
def test_refused_exactly_where_a_name_matters_and_the_lock_disagrees(
    environ: dict[str, str], locked: dict[str, str]
) -> None:
    offenders = {
        name
        for name, value in environ.items()
        if (locked[name] != value if name in locked else influence(name) is not None)
        and (name in locked or (name, value) not in SAME_GPUS)
    }
    if not offenders:
        refuse_influences(environ, make_lock(locked))
        return
    with pytest.raises(UsageError) as caught:
        refuse_influences(environ, make_lock(locked))
    lines = [line.strip().split(":")[0] for line in caught.value.found.splitlines()[1:]]
    assert set(lines) == offenders


@given(environ=environments)
def test_passing_everything_on_makes_any_environment_acceptable(environ: dict[str, str]) -> None:
    refuse_influences(environ, make_lock(environ))
