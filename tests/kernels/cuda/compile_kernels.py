"""Compile the Triton kernels for a GPU that is not there, in the variants that the cases launch; print a `Report`.

Usage: compile_kernels.py CAPABILITY [--shared | --loads]. 90 is compute capability 9.0. Launches compile and do
nothing. Each variant is compiled to Triton's IR. One that holds a function or inline assembly that no earlier variant
holds is compiled to machine code. With --shared, the shared memory of the others is allocated too, and the heads of
common models are added. With --loads, matmuls alone are compiled, and their loads before and between the waits counted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton.compiler
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.code_generator import CodeGenerator
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from outrider.kernels.cases import Case

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a program may use, by capability
FP8_CAPABILITY = 89
PTX_VERSION = 80
PACKAGE = "outrider.kernels.cuda"
# Functions that the interpreter alone runs.
INTERPRETED = {f"{PACKAGE}.quantized_matmul.{name}" for name in ("_byte", "_nibble")}


@dataclass
class Report:
    variants: int = 0
    assembled: int = 0  # variants that were compiled to machine code
    refused: list[str] = field(default_factory=list)  # variants that do not compile
    too_large: list[str] = field(default_factory=list)  # variants that need more shared memory than a program may use
    silent: list[str] = field(default_factory=list)  # cases that fail before they launch a kernel
    missing: list[str] = field(default_factory=list)  # functions that no variant holds
    # Loads of a matmul until its loop begins: before the first wait, between the waits, and after the last one.
    loads: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Compiler:
    """Takes the place of Triton's compiler. Variants are compiled once: Triton looks in its cache before."""

    target: GPUTarget
    allocates: bool
    counts_loads: bool = False
    report: Report = field(default_factory=Report)
    compiled: set[JITFunction[Any]] = field(default_factory=set)
    assembled: set[Any] = field(default_factory=set)  # functions and inline assembly that reached machine code
    visited: set[JITFunction[Any]] = field(default_factory=set)  # by the variant that is being compiled
    variants: set[Any] = field(default_factory=set)
    launches: int = 0

    def compile(self, source: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> object:
        if self.target.arch < FP8_CAPABILITY and "fp8e4nv" in str(source.signature):
            return object()  # the engine refuses such KV pages
        variant = (source.fn, str(source.signature), str(source.constants), str(options))
        if variant in self.variants:  # it differs in the alignment of its arguments alone
            return object()
        self.variants.add(variant)
        self.visited = {source.fn}
        try:
            self._lower(source, options)
        except Exception as error:
            self.report.refused.append(f"{_described(source, options)}\n{error}\n{error.__cause__ or ''}")
        self.compiled |= self.visited
        return object()

    def _lower(self, source: Any, given: dict[str, Any]) -> None:
        backend = make_backend(self.target)
        options = backend.parse_options(given)
        stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        backend.add_stages(stages, options, source.language)
        context, metadata = ir.context(), dict(vars(options))
        ir.load_dialects(context)
        backend.load_dialects(context)
        generators, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(self.target, options, generators, modules, context)
        module = stages.pop("ttir")(module, metadata)
        if self.counts_loads and source.name.endswith("matmul_tile"):
            for name in ("ttgir", "llir", "ptx"):
                module = stages[name](module, metadata)
            self.report.loads[_described(source, given)] = loads_between_waits(str(module))
            return
        held = self.visited | set(re.findall('asm_string = "[^"]*"', str(module)))
        if held <= self.assembled and not self.allocates:
            return
        module = stages.pop("ttgir")(module, metadata)
        if held <= self.assembled:
            shared = self._allocated(module, context)
        else:
            self.assembled |= held
            self.report.assembled += 1
            for lower in stages.values():
                module = lower(module, metadata)
            shared = metadata["shared"]
        if shared > 1024 * SHARED_MEMORY[self.target.arch]:
            self.report.too_large.append(f"{shared} bytes: {_described(source, given)}")

    def _allocated(self, module: Any, context: Any) -> int:
        """Return the bytes of shared memory: the passes that start the translation to LLVM's IR."""
        manager = ir.pass_manager(context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, self.target.arch, PTX_VERSION)
        manager.run(module, "allocate")
        return int(module.get_int_attr("ttg.shared"))


def loads_between_waits(ptx: str) -> list[int]:
    """Count the loads before the first label, apart by the waits for the kernel before (PDL)."""
    before_loop = re.split(r"^\$L__BB\w+:", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    return [len(re.findall(r"cp\.async\.c[ag]|ld\.global", part)) for part in before_loop.split("griddepcontrol.wait")]


def _described(source: Any, options: dict[str, Any]) -> str:
    """Return the name of a variant: the kernel and its constants."""
    constants = {source.fn.arg_names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
    return f"{source.name} {constants}, {options['num_warps']} warps, {options['num_stages']} stages"


def install(capability: int, allocates: bool, counts_loads: bool) -> Compiler:
    """Let Triton and torch see a GPU, and compile instead of launching."""
    compiler = Compiler(GPUTarget("cuda", capability, 32), allocates, counts_loads)
    properties = {"max_shared_mem": 1024 * SHARED_MEMORY[capability]}
    driver.set_active(
        SimpleNamespace(
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: compiler.target,
        )
    )
    patched: Any = torch.cuda
    patched.is_available = lambda: True
    patched.get_device_capability = lambda *_: divmod(capability, 10)
    patched_module: Any = triton.compiler
    patched_module.compile = compiler.compile
    launch, call = JITFunction.run, CodeGenerator.call_JitFunction

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiler.launches += 1
        return launch(self, *args, grid=grid, warmup=True, **options)

    def call_and_note(self: Any, function: Any, *args: Any, **named: Any) -> Any:
        compiler.visited.add(function)
        return call(self, function, *args, **named)

    JITFunction.run, CodeGenerator.call_JitFunction = compile_only, call_and_note
    for name in ("empty", "empty_like"):  # no kernel writes results: the host reads zeros
        setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
    return compiler


def backend_modules() -> list[ModuleType]:
    folder = Path(import_module(PACKAGE).__file__ or "").parent
    return [import_module(f"{PACKAGE}.{file.stem}") for file in sorted(folder.glob("[!_]*.py"))]


def launches(with_common: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what to run, with its name: the cases, those of the tests of this folder, and kernels without cases.

    with_common: also the attention of common models; the cases have smaller heads.
    """
    from outrider.kernels import cuda
    from outrider.kernels.cases import CASES, Case
    from outrider.kernels.cuda import batch_invariant

    cases = {id(case): case for case in [*CASES, *(attention_cases() if with_common else [])]}
    for file in sorted(Path(__file__).parent.glob("test_cuda_*.py")):
        known = getattr(import_module(file.stem), "CASES", [])
        cases.update({id(case): case for case in known if isinstance(case, Case)})
    for ops in (cuda, batch_invariant):
        for case in cases.values():
            if not case.timed and case.op != "record":  # that one launches kernels of other operations
                yield f"{case.op} {case.name}", lambda case=case, ops=ops: case.build(ops, 1)(None)
    yield from distillation()
    yield from range_attention()
    yield from tuned_matmuls()
    yield from e4m3_matmuls()


def attention_cases() -> list[Case]:
    """Return the attention of common models, with tiles of decode steps, of drafts and of prompts."""
    from outrider.kernels.cases.inputs import Shape
    from outrider.kernels.cases.layers import attend

    return [
        attend(f"{size} dimensions, {dtype}, {count} tokens", dtype=dtype, rows=((300, count),), shape=shape)
        for size in (64, 128, 256)
        for shape in [Shape(width=64, heads=8, kv_heads=2, head_dim=size)]
        for dtype in (torch.float16, torch.int8, torch.float8_e4m3fn)
        for count in (1, 5, 16, 256, 1024)
    ]


def distillation() -> Iterator[tuple[str, Callable[[], object]]]:
    module = import_module(f"{PACKAGE}.distill")
    logits, whole, rows = torch.zeros(3, 5000), torch.zeros(3), torch.arange(3)
    for kind in sorted(module.KINDS):
        for gradient in (None, torch.zeros(3, 5000, dtype=torch.bfloat16)):
            yield f"distill {kind}", lambda k=kind, g=gradient: module.distill(k, logits, logits, None, g)
        yield f"distill {kind}", lambda k=kind: module.distill(k, logits, logits, whole, logits.clone(), rows)


def range_attention() -> Iterator[tuple[str, Callable[[], object]]]:
    from outrider.kernels.structures import AttentionRanges, OwnKeys

    module = import_module(f"{PACKAGE}.range_attention")

    def run(dtype: torch.dtype, size: int, with_own: bool) -> None:
        query, keys = (torch.zeros(2, 40, heads, size, dtype=dtype, requires_grad=True) for heads in (4, 2))
        own = torch.zeros(2, 40, 3, 2, size, dtype=dtype, requires_grad=True)
        bounds = torch.zeros(2, 40, dtype=torch.int32)
        ranges = AttentionRanges(keys, keys, bounds, bounds, OwnKeys(own, own, None) if with_own else None)
        module.attend(query, ranges).sum().backward()

    for dtype in (torch.bfloat16, torch.float32):
        for size in (64, 128, 256):
            for own in (False, True):
                yield f"range attention {dtype} {size}", lambda d=dtype, s=size, o=own: run(d, s, o)


def tuned_matmuls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield matmuls with the tilings that GPUs use. The matrices have fewer rows than those that were measured."""
    from outrider.kernels.cases import inputs
    from outrider.kernels.cuda import matrices
    from outrider.kernels.cuda.epilogue import Biases

    matmul, quantized_matmul = import_module(f"{PACKAGE}.matmul"), import_module(f"{PACKAGE}.quantized_matmul")
    stored = {"float": "bf16", "int4": "q4_0", "int8": "q8_0", "fp8": "fp8"}

    def run(kind: str, columns: int, gated: bool, tile: Any) -> None:
        outputs = tile.outputs
        weight = inputs.random_weight(inputs.generator(1), stored[kind], (1 + gated) * outputs, columns)
        matrix, activation = matrices.matrix(weight), "silu" if gated else None
        x, out, biases = torch.zeros(16, columns), torch.zeros(16, outputs), Biases(None, None)
        if kind == "float":
            matmul.launch(x.to(matrix.compute), matrix, None, 0.0, biases, out, tile, activation, False)
            matmul.launch(x, matrix, torch.ones(columns), 1e-6, biases, out, tile, activation, False)
        else:
            quantized_matmul.launch(x.to(matrix.compute), matrix, biases, out, activation, False, tile)
            quantized_matmul.dequantized_rows(matrix, 0, outputs)

    for (_, outputs, columns, gated, rows), tile in matmul.TUNED.items():
        yield f"float {outputs}x{columns}x{rows}", lambda c=columns, g=gated, t=tile: run("float", c, g, t)
    for (kind, outputs, columns, gated, rows), tile in quantized_matmul.TUNED.items():
        yield f"{kind} {outputs}x{columns}x{rows}", lambda k=kind, c=columns, g=gated, t=tile: run(k, c, g, t)
    shapes = ((3072, 1024, False), (1024, 1024, False), (1024, 3072, False), (3072, 1024, True))
    for (outputs, columns, gated), rows in product((*shapes, (17408, 1024, True)), (16, *matmul.MANY_ROWS)):
        tile = matmul.choose(2, outputs, columns, gated, rows)
        name = f"float {outputs}x{columns}x{rows} by its form"
        if tile is not None:
            yield name, lambda c=columns, g=gated, t=tile: run("float", c, g, t)
    for kind, (outputs, columns, gated), rows in product(("int4", "int8", "fp8"), shapes, quantized_matmul.USUAL):
        tile = quantized_matmul.choose(kind, outputs, columns, gated, rows, 1)
        yield f"{kind} {outputs}x{columns} of {rows} rows", lambda k=kind, c=columns, g=gated, t=tile: run(k, c, g, t)


def e4m3_matmuls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the kernels around cuBLAS, in the sizes of an 8B model."""
    from outrider.kernels.cases import inputs
    from outrider.kernels.cuda import matrices
    from outrider.kernels.quantization import quantize_fp8

    matmul = import_module(f"{PACKAGE}.matmul")

    def run(columns: int, dtype: torch.dtype, terms: int) -> None:
        stored = quantize_fp8(inputs.random_weight(inputs.generator(1), "bf16", 32, columns))
        matrix = replace(matrices.matrix(stored), terms=terms)
        x, norm, bias = torch.zeros(40, columns, dtype=dtype), torch.ones(columns), torch.zeros(32)
        for tokens in (3, 40):
            matmul.matmul(x[:tokens], matrix, bias=bias)
            matmul.matmul(x[:tokens], matrix, norm=norm, eps=1e-6, add=torch.zeros(tokens, 32))
            for deltas in (None, torch.zeros(tokens, 32)):
                named = {"norm": norm, "eps": 1e-6, "activation": "silu", "deltas": deltas}
                matmul.gated_matmul(x[:tokens], matrix, gate_bias=None, up_bias=None, **named)

    for columns, dtype, terms in product((4096, 14336), (torch.float32, torch.bfloat16), (1, 2)):
        yield f"e4m3 {columns} {dtype} {terms}", lambda c=columns, d=dtype, t=terms: run(c, d, t)


def few_row_matmuls() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, launch in tuned_matmuls():
        if name.startswith("float") or name.endswith("of 8 rows"):
            yield name, launch


def run(capability: int, allocates: bool, counts_loads: bool) -> Report:
    compiler = install(capability, allocates, counts_loads)
    report, modules = compiler.report, backend_modules()
    for module in modules:
        if hasattr(module, "DEVICE"):
            module.DEVICE = torch.device("cpu")
    vars(import_module(f"{PACKAGE}.matrices"))["EXPANDED"] = 0  # short rows stay quantized
    vars(import_module(f"{PACKAGE}.matmul"))["_cublas"] = lambda *_: None
    vars(import_module(f"{PACKAGE}.e4m3_matmul"))["_cublas"] = lambda lines, weights, one, dtype: torch.zeros(
        len(lines), len(weights), dtype=dtype
    )
    for name, launch in few_row_matmuls() if counts_loads else launches(allocates):
        earlier = compiler.launches
        try:
            launch()
        except Exception as error:  # a case may fail over results that are not there
            if compiler.launches == earlier:
                report.silent.append(f"{name}: {error!r}")
    functions = {each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)}
    report.variants = len(compiler.variants)
    names = {f"{each.__module__}.{each.__name__}" for each in functions - compiler.compiled}
    report.missing = sorted(names - INTERPRETED)
    return report


if __name__ == "__main__":
    json.dump(asdict(run(int(sys.argv[1]), "--shared" in sys.argv, "--loads" in sys.argv)), sys.stdout)
