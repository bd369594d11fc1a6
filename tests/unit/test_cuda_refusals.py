"""No GPU, the wrong one, no Triton, too little memory: one sentence that says what to do, and the CPU works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider import LLM, SamplingParams, UserError
from outrider.device import check_activations, check_kv_dtype, choose_backend, cuda, open_device, within_memory

LACKING = {
    "no GPU": ({"torch.cuda.is_available": lambda: False}, "torch sees no NVIDIA GPU (see `nvidia-smi`"),
    "no CUDA": ({"torch.version.cuda": None}, "this torch is built without CUDA"),
    "AMD": ({"torch.version.hip": "6.3", "torch.version.cuda": None}, "this torch is built for AMD GPUs"),
    "too old": (
        {"torch.cuda.get_device_capability": lambda: (7, 5), "torch.cuda.get_device_name": lambda: "Tesla T4"},
        "the GPU `Tesla T4` has compute capability 7.5, and the kernels need 8.0",
    ),
    "no Triton": (
        {"outrider.device.cuda.find_spec": lambda name: None},
        "Triton is not installed (`pip install triton`)",
    ),
}
PARAMS = SamplingParams(max_tokens=6, temperature=1, seed=3, ignore_eos=True)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a GPU that serves, as far as anyone who asks can tell."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in {
        "torch.version.cuda": "12.8",
        "torch.version.hip": None,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.get_device_capability": lambda: (9, 0),
        "torch.cuda.get_device_name": lambda: "NVIDIA H200",
        "outrider.device.cuda.find_spec": lambda name: object(),
    }.items():
        monkeypatch.setattr(name, value)
    return monkeypatch


@pytest.fixture(params=LACKING)
def lacking(request: pytest.FixtureRequest, serving: pytest.MonkeyPatch) -> str:
    """The same machine, but for one thing; gives what is said of that."""
    changes, reason = LACKING[request.param]
    for name, value in changes.items():
        serving.setattr(name, value)
    return reason


def test_a_gpu_without_fp8_is_refused_for_fp8_keys_and_values(serving: pytest.MonkeyPatch) -> None:
    check_kv_dtype("cuda", "fp8")
    serving.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
    check_kv_dtype("cuda", "int8")
    check_kv_dtype("cpu", "fp8")
    with pytest.raises(UserError, match=r"capability 8\.6, and e4m3 needs 8\.9: pass `kv_dtype=int8`"):
        check_kv_dtype("cuda", "fp8")


def test_a_gpu_without_fp8_is_refused_for_fast_activations(serving: pytest.MonkeyPatch, tiny_folder: Any) -> None:
    check_activations("cuda", "fast")
    serving.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
    check_activations("cuda", "auto")
    check_activations("cpu", "fast")
    with pytest.raises(UserError, match=r"capability 8\.6, and e4m3 needs 8\.9: pass `activations=high`"):
        LLM(str(tiny_folder()), backend="cuda", activations="fast")


def test_a_gpu_that_serves_is_chosen(serving: pytest.MonkeyPatch) -> None:
    assert cuda.why_unavailable() is None
    assert choose_backend("auto") == "cuda"
    assert choose_backend("cpu") == "cpu"


def test_what_is_lacking_is_said_and_the_cpu_works(lacking: str, tiny_folder: Any) -> None:
    with pytest.raises(UserError) as refusal:
        LLM(str(tiny_folder()), backend="cuda")
    assert str(refusal.value).startswith(f"`backend` is `cuda`, but {lacking}")
    assert str(refusal.value).endswith(": use `backend=cpu`, which works without")
    assert choose_backend("auto") == "cpu"
    llm = LLM(str(tiny_folder()))
    assert llm.resolved.backend == "cpu"
    assert len(llm.generate([[5, 6, 7]], PARAMS)[0].completions[0].token_ids) == 6


def test_interpreted_kernels_run_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert open_device("cuda").torch_device == torch.device("cpu")


def exhausted(error: Exception) -> Any:
    def run(*_: object, **__: object) -> None:
        raise error

    return run


@pytest.mark.parametrize("where", ["outrider.engine.build", "outrider.cache.pages.Pages.allocate"])
@pytest.mark.parametrize(
    ("error", "device", "cpu"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "the GPU has left", True),
        (RuntimeError("CUDA error: out of memory"), "the GPU has left", True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "this machine has left", False),
        (MemoryError("Unable to allocate 9 TiB"), "this machine has left", False),
    ],
)
def test_too_little_memory(
    where: str, error: Exception, device: str, cpu: bool, monkeypatch: pytest.MonkeyPatch, tiny_folder: Any
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(where, exhausted(error))
        remedy = "use a smaller model or one with fewer bits, lower"
        with pytest.raises(UserError, match=f"more memory than {device}: {remedy}") as refusal:
            LLM(str(tiny_folder()), backend="cpu")
    assert refusal.value.__cause__ is error
    assert str(refusal.value).endswith("or use `backend=cpu`") is cpu
    LLM(str(tiny_folder()), backend="cpu")


def test_an_absurd_cache_is_refused(tiny_folder: Any) -> None:
    with pytest.raises(UserError, match="lower `cache_tokens`"):
        LLM(str(tiny_folder()), backend="cpu", cache_tokens=10**14)


def test_threads_that_cannot_be_started_are_a_user_error() -> None:
    with pytest.raises(UserError, match=r"^cannot start 2 threads .*: lower `threads`"), within_memory():
        raise RuntimeError("cannot start 2 threads (Resource temporarily unavailable): lower `threads`")


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), UserError("no"), KeyError("out of memory")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as found, within_memory():
        raise error
    assert found.value is error


def test_flags_of_the_gpu_change_nothing_on_the_cpu(tiny_folder: Any) -> None:
    plain = LLM(str(tiny_folder()), backend="cpu").generate([[5, 6, 7]], PARAMS)[0].completions[0].token_ids
    for flags in (
        {"deterministic": True},
        {"enforce_eager": True},
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL_DECODE_ONLY"},
        {"decode_steps": 4},
    ):
        llm = LLM(str(tiny_folder()), backend="cpu", **flags)
        assert llm.generate([[5, 6, 7]], PARAMS)[0].completions[0].token_ids == plain, flags


def test_only_device_and_kernels_know_the_gpu() -> None:
    """import-linter sees modules, not attributes: `torch.cuda` is looked for here."""
    root = Path(outrider.__file__).parent
    knowing = {path.relative_to(root) for path in root.rglob("*.py") if "torch.cuda" in path.read_text()}
    assert Path("device/cuda.py") in knowing
    strangers = {path for path in knowing if path.parts[:1] != ("device",) and path.parts[:2] != ("kernels", "cuda")}
    assert not strangers
