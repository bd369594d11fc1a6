"""Build the native library with sanitizers, and load it instead of the usual one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The checks of null, object size and alignment would take minutes to compile, and AddressSanitizer finds most of it.
MEMORY = "-fsanitize=address,undefined -fno-sanitize=null,object-size,vptr,alignment -fno-omit-frame-pointer -g1"
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}


def build(folder: Path, flags: str = MEMORY) -> Path:
    """Build every kernel for every level of this machine at -O1, which keeps the memory accesses of intrinsics."""
    nanobind = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True).strip()
    rule = "<CMAKE_CXX_COMPILER> <DEFINES> <INCLUDES> <FLAGS> -O1 -o <OBJECT> -c <SOURCE>"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None"]
    configure += [f"-DCMAKE_CXX_FLAGS={flags}", f"-DCMAKE_CXX_COMPILE_OBJECT={rule}"]
    configure += [f"-Dnanobind_DIR={nanobind}", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, env=environment)
    subprocess.run(["cmake", "--build", str(folder)], check=True, stdout=subprocess.DEVNULL, env=environment)
    return next(folder.glob("_native*.so"))


def environment() -> dict[str, str]:
    """Return the environment of a Python that loads the sanitized library: the sanitizer must be preloaded."""
    found = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    return {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(found), "OMP_NUM_THREADS": "1"}


def use(library: Path) -> None:
    """Load this file as `outrider.kernels.cpu._native`."""
    name = "outrider.kernels.cpu._native"
    assert name not in sys.modules, "the usual library is loaded already"
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
