"""List and remove the models in the cache."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .cache import cache_folder, hub_path, lock, read_record, record_path
from .download import part_files
from .entries import CATALOG
from .gguf_type import stated_quantization
from .hub_folder import find_folder, hub_cache, repository_folder
from .names import HubName, UrlName, display_name, parse, quantization, split_parts, split_revision, suggestion
from .pulling import find, is_pulled
from .pulling import path as catalog_path
from .shipped import methods_for

# Architectures of config.json that the engine runs, so that other models of the hub's cache are not listed.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",
    "MiMoForCausalLM",
)
# Values of `quant_method` in config.json that the engine reads.
QUANTIZED = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4")


@dataclass(frozen=True)
class Pulled:
    """A model in the cache."""

    name: str
    path: Path
    bytes: int
    format: str  # GGUF or safetensors
    quantization: str
    heads: tuple[str, ...]  # methods whose head or draft model ships for it
    modified: float  # seconds since 1970


def pulled() -> list[Pulled]:
    """List the models in the cache, the newest first."""
    found = [*_catalog_models(), *_hub_files(), *_url_files(), *_hub_folders()]
    return sorted(found, key=lambda model: -model.modified)


def _of_file(name: str, file: Path) -> Pulled:
    parts = [Path(part).stat() for part in split_parts(str(file))]
    kind = quantization(file.name) or stated_quantization(file) or "unknown"
    size, modified = sum(part.st_size for part in parts), max(part.st_mtime for part in parts)
    return Pulled(name, file, size, "GGUF", kind, methods_for(name), modified)


def _catalog_models() -> Iterator[Pulled]:
    for name in CATALOG:
        if is_pulled(name):
            yield _of_file(name, catalog_path(name))


def _gguf_files(folder: Path) -> Iterator[Path]:
    files = (file for file in sorted(folder.rglob("*.gguf")) if not file.name.startswith("."))
    return (file for file in files if file.is_file())


def _hub_files() -> Iterator[Pulled]:
    root = cache_folder() / "hub"
    for folder in sorted(root.glob("*/*/")):
        repository = str(folder.relative_to(root))
        files = [str(file.relative_to(folder)) for file in _gguf_files(folder)]
        for file in (file for file in files if split_parts(file)[0] == file and set(split_parts(file)) <= set(files)):
            default = bool(read_record(folder / file).get("default"))
            yield _of_file(repository if default else display_name(repository, file, files), folder / file)


def _url_files() -> Iterator[Pulled]:
    for file in _gguf_files(cache_folder() / "urls"):
        name = read_record(file).get("name")
        if isinstance(name, str):
            yield _of_file(name, file)


def _hub_folders() -> Iterator[Pulled]:
    for folder in sorted(hub_cache().glob("models--*--*/")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = find_folder(name)
        if snapshot is None:
            continue
        try:
            config = json.loads((snapshot / "config.json").read_text())
            runs = set(config.get("architectures") or ()) & set(ARCHITECTURES)
            weights = [file.stat() for file in snapshot.glob("*.safetensors")]
        except (OSError, ValueError, AttributeError, TypeError):
            continue
        quantized = config.get("quantization_config")
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        if runs and (quantized is None or method in QUANTIZED):
            kind = str(method or config.get("torch_dtype") or config.get("dtype") or "unknown")
            size, modified = sum(each.st_size for each in weights), max(each.st_mtime for each in weights)
            yield Pulled(name, snapshot, size, "safetensors", kind, methods_for(name), modified)


# ---- removal ----


def remove(name: str) -> int:
    """Remove a model from the cache, with what an interrupted pull left; return the bytes that were freed."""
    try:
        freed = _remove(name)
    except BlockingIOError:
        raise UserError(f"`{name}` is being pulled now: stop that first") from None
    except OSError as error:
        raise UserError(f"cannot remove `{error.filename or name}`: {error.strerror or error}") from None
    if freed is None:
        known = [model.name for model in pulled()]
        hint = suggestion(name, known).replace(" --catalog", "")
        raise UserError(f"`{name}` is not in the cache, nothing was removed: {hint}")
    return freed


def _remove(name: str) -> int | None:
    """Return None if there is nothing to remove."""
    if name in CATALOG:
        return _remove_folder(cache_folder() / "models" / name)
    parsed = parse(name)
    if isinstance(parsed, UrlName):
        return _remove_folder(cache_folder() / "urls" / parsed.folder)
    if not isinstance(parsed, HubName):
        return None
    folder = hub_path(parsed.repository)
    file = find(name)
    if file is not None and file.is_file():
        _check_inside(folder)
        with lock(folder):
            parts = [Path(part) for part in split_parts(str(file))]
            removed = sum(_remove_files(part, record_path(part), *part_files(part)) for part in parts)
        return removed if any(_gguf_files(folder)) else removed + (_remove_folder(folder) or 0)
    leftover = folder.is_dir() and not any(_gguf_files(folder))  # of an interrupted pull
    freed = _remove_folder(folder) if leftover else None
    if not parsed.tag and repository_folder(parsed.repository).is_dir():
        return _remove_from_hub_cache(parsed.repository) + (freed or 0)
    return freed


def _check_inside(folder: Path) -> None:
    """Refuse a folder that is a link to a place outside of the cache."""
    if not folder.resolve().is_relative_to(cache_folder().resolve()):
        raise UserError(f"`{folder}` is a link to `{folder.resolve()}`, outside of the cache: remove it yourself")


def _remove_folder(folder: Path) -> int | None:
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    _check_inside(folder)
    with lock(folder):
        freed = _bytes_below(folder)
        shutil.rmtree(folder)  # follows no links
    with contextlib.suppress(OSError):  # they hold other models
        for parent in folder.parents:
            if parent == cache_folder():
                break
            parent.rmdir()
    return freed


def _remove_files(*files: Path) -> int:
    freed = 0
    for file in files:
        freed += file.lstat().st_size if file.is_file() else 0
        file.unlink(missing_ok=True)
    return freed


def _bytes_below(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def _remove_from_hub_cache(name: str) -> int:
    folder = repository_folder(name)
    if folder.resolve() != hub_cache().resolve() / folder.name:
        raise UserError(f"`{folder}` is a link to `{folder.resolve()}`, outside of the hub's cache: remove it yourself")
    if split_revision(name)[1]:
        return _remove_revision(name)
    freed = _bytes_below(folder / "blobs") if (folder / "blobs").is_dir() else _bytes_below(folder)
    shutil.rmtree(folder)
    return freed


def _remove_revision(name: str) -> int:
    """Remove one revision; files that other revisions share stay."""
    from huggingface_hub import scan_cache_dir

    snapshot = find_folder(name)
    if snapshot is None:
        return 0
    plan = scan_cache_dir(hub_cache()).delete_revisions(snapshot.name)
    plan.execute()
    return plan.expected_freed_size
