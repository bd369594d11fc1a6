"""A backend is a module that defines every operation, with the signature of the protocol; each has a case."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from outrider import kernels
from outrider.config import BACKENDS
from outrider.kernels import cpu
from outrider.kernels.cases import CASES
from outrider.kernels.quantization import FORMATS

CUDA_VARIANTS = ["cuda.batch_invariant", "cuda.fast_activations", "cuda.batch_invariant_fast"]
OPERATIONS = [name for name, member in vars(kernels.Kernels).items() if inspect.isfunction(member) and name[0] != "_"]


def test_the_protocol_is_not_empty() -> None:
    assert {"matrix", "linear", "attend", "sample"} <= set(OPERATIONS)


@pytest.mark.parametrize("backend", [*BACKENDS, "cpu.fast_activations", *CUDA_VARIANTS])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_backends_define_each_operation_as_the_protocol_does(backend: str, operation: str) -> None:
    protocol = inspect.signature(getattr(kernels.Kernels, operation))
    found = inspect.signature(getattr(importlib.import_module(f"outrider.kernels.{backend}"), operation))
    meant = [parameter for parameter in protocol.parameters.values() if parameter.name != "self"]
    actuals, more = list(found.parameters.values())[: len(meant)], list(found.parameters.values())[len(meant) :]
    assert [actual.name for actual in actuals] == [parameter.name for parameter in meant]
    for parameter, actual in zip(meant, actuals, strict=True):
        assert (actual.kind, actual.default) == (parameter.kind, parameter.default)
        assert agree(parameter.annotation, actual.annotation)
    assert all(actual.default is not actual.empty for actual in more)  # callers of the protocol need not pass more
    assert agree(protocol.return_annotation, found.return_annotation)


def agree(protocol: str, backend: str) -> bool:
    """Handles are opaque: where the protocol says Any, a backend says what it is."""
    return re.fullmatch(re.escape(protocol).replace("Any", ".+"), backend) is not None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_has_a_case(operation: str) -> None:
    assert any(case.op == operation for case in CASES)


def test_case_names_are_unique() -> None:
    names = [(case.op, case.name) for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", FORMATS)
def test_linear_covers_each_format(kind: str) -> None:
    assert {case.items for case in CASES if case.op == "linear" and case.name.startswith(f"{kind} ")} >= {1, 3, 16, 40}


@pytest.mark.parametrize("backend", BACKENDS)
def test_load_returns_the_backend(backend: str) -> None:
    assert kernels.load(backend) is importlib.import_module(f"outrider.kernels.{backend}")


def test_options_load_variants_of_the_cuda_kernels() -> None:
    options: list[dict[str, Any]] = [
        {"deterministic": True},
        {"activations": "fast"},
        {"deterministic": True, "activations": "fast"},
    ]
    for chosen, name in zip(options, CUDA_VARIANTS, strict=True):
        assert kernels.load("cuda", **chosen) is importlib.import_module(f"outrider.kernels.{name}")
    for activations in ("auto", "high"):
        assert kernels.load("cuda", activations=activations) is importlib.import_module("outrider.kernels.cuda")


def test_fast_activations_are_chosen_by_name_or_by_level() -> None:
    fast = importlib.import_module("outrider.kernels.cpu.fast_activations")
    assert kernels.load("cpu", activations="fast") is fast
    assert kernels.load("cpu", activations="high") is cpu
    assert kernels.load("cpu", activations="auto") is (fast if cpu.facts()["level"] in ("neon", "i8mm") else cpu)


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="`tpu`"):
        kernels.load("tpu")
