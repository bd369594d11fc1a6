"""Hugging Face folders: config.json, and safetensors in one file or several.

The safetensors library checks the headers (length, JSON, dtypes, extents, overlaps). Its errors become UserErrors here.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from ..kernels.quantization import FORMATS
from .checkpoint import Checkpoint, Stored, listed_ids, map_file, read_json, view
from .quantized import QuantizedMatrix, Settings, join, read_settings

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Dtypes of the tensors of quantized matrices, by their names in safetensors.
PACKED_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}

# Prefixes of the language model in multimodal checkpoints, written by different versions of transformers.
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}

OFFSET_NORMS = ("gemma", "qwen3_next", "qwen3_5")  # beginnings of the model types whose norm weights are stored minus 1
# Defaults of transformers, which the text part of a Gemma 3 config leaves out.
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}


def open_folder(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"`{path}` is a LoRA adapter, not a model: pass the model that it was made for, and this with `--lora`"
            )
        files = sorted(path.glob("*.gguf"))
        hint = f"pass the file `{files[0]}`" if files else "pass a Hugging Face folder or a GGUF file"
        raise UserError(f"`{path}` is not a model, it has no `config.json`: {hint}")
    original = read_json(path / "config.json")
    config = normalize(original)
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    begin, end = (_first_set(key, generation, original, config) for key in ("bos_token_id", "eos_token_id"))
    tensors, mappings = read_tensors(path, read_settings(path, original))
    return Checkpoint(
        path=path,
        config=config,
        tensors=tensors,
        tokenizer_source=path,
        generation=generation | {"bos_token_id": begin, "eos_token_id": listed_ids(end)},
        norms_are_offset=str(config.get("model_type")).startswith(OFFSET_NORMS),
        mappings=mappings,
    )


def _first_set(key: str, *sources: dict[str, Any]) -> Any:
    """Return the value from the first source that sets `key`, else None."""
    return next((source[key] for source in sources if source.get(key) is not None), None)


def normalize(original: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's part of a config, with the rope settings under the older keys."""
    config = dict(original)
    text = original.get("text_config")
    if isinstance(text, dict):
        shared: tuple[str, ...] = ("architectures", "tie_word_embeddings")
        config = {**{key: original[key] for key in shared if key in original}, **text}
    if config.get("model_type") in ("gemma3", "gemma3_text"):
        config = GEMMA3_DEFAULTS | {key: value for key, value in config.items() if value is not None}
        config["model_type"] = "gemma3_text"
    if config.get("model_type") in ("qwen3_5", "qwen3_5_moe"):
        config["model_type"] += "_text"
    return config | classic_rope(config)


def classic_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Convert `rope_parameters` of newer transformers to `rope_theta`, `rope_scaling` and `rope_local_base_freq`."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    local = parameters.get("sliding_attention")
    classic: dict[str, Any] = {}
    if isinstance(local, dict) and "rope_theta" in local:
        classic["rope_local_base_freq"] = local["rope_theta"]
    whole = parameters.get("full_attention")
    parameters = whole if isinstance(whole, dict) else parameters
    if "rope_theta" in parameters:
        classic["rope_theta"] = parameters["rope_theta"]
    scaled = parameters.get("rope_type", "default") != "default"
    classic["rope_scaling"] = (
        {key: value for key, value in parameters.items() if key != "rope_theta"} if scaled else None
    )
    return classic


def read_tensors(
    folder: Path, settings: Settings | None = None
) -> tuple[dict[str, Stored | QuantizedMatrix], tuple[mmap.mmap, ...]]:
    """Read all tensors by name, and the mapped files that they view. With `settings`, join quantized matrices."""
    tensors: dict[str, Stored] = {}
    mappings: list[mmap.mmap] = []
    weight_map = read_index(folder)
    for file in sorted(set(weight_map.values())) if weight_map else [single_file(folder)]:
        found, mapped = read_shard(folder / file, packed=settings is not None)
        mappings.append(mapped)
        for name, stored in found.items():
            if name in tensors:
                raise UserError(f"`{folder}`: the tensor `{name}` is in two files, `{file}` is one of them")
            tensors[name] = stored
    for name, file in weight_map.items():
        if name not in tensors:
            raise UserError(f"`{folder / file}` has no tensor `{name}`, which `{INDEX}` puts there: fetch it again")
    renamed = {text_name(name): stored for name, stored in tensors.items()}
    if any(name.startswith(tuple(TEXT_PREFIXES)) for name in tensors):  # multimodal: the other tensors are for images
        kept = ("model.embed", "model.layers.", "model.norm.", "lm_head.", "mtp.")
        renamed = {name: stored for name, stored in renamed.items() if name.startswith(kept)}
    if settings is None:
        return {**renamed}, tuple(mappings)
    matrices, used = join(settings, {name: stored.data for name, stored in renamed.items()})
    others = {name: stored for name, stored in renamed.items() if name not in used}
    strange = next((name for name, stored in others.items() if stored.kind in PACKED_DTYPES), None)
    if strange is not None:
        raise settings.refuse(f"the tensor `{strange}` of `{others[strange].kind}` belongs to no matrix")
    return {**others, **matrices}, tuple(mappings)


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor; empty if there is a single file."""
    if not (folder / INDEX).is_file():
        return {}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"`{folder / INDEX}` has no `weight_map`: fetch it again")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"`{folder / INDEX}` names the file `{file}`, which lies outside of the folder")
    return weight_map


def single_file(folder: Path) -> str:
    if (folder / SINGLE).is_file():
        return SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0].name
    if files:
        raise UserError(f"`{folder}` has {len(files)} safetensors files and no `{INDEX}`: fetch it again")
    if list(folder.glob("*.bin")):
        raise UserError(f"`{folder}` has pickled weights only, which are unsafe to read: convert them to safetensors")
    raise UserError(f"`{folder}` has no `{SINGLE}`: fetch the weights too")


def read_shard(path: Path, packed: bool = False) -> tuple[dict[str, Stored], mmap.mmap]:
    """Read the tensors of a file. packed: allow the dtypes of quantized matrices, which become kinds."""
    try:
        with safe_open(path, framework="pt"):  # checks the header
            mapped = map_file(path)
        size = int.from_bytes(mapped[:8], "little")
        entries = json.loads(mapped[8 : 8 + size])
        entries.pop("__metadata__", None)
        tensors: dict[str, Stored] = {}
        for name, entry in entries.items():
            if entry["dtype"] not in KINDS and not (packed and entry["dtype"] in PACKED_DTYPES):
                known = ", ".join([*KINDS, *PACKED_DTYPES] if packed else KINDS)
                raise UserError(f"`{path}` stores the tensor `{name}` as `{entry['dtype']}`: expected one of {known}")
            kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if math.prod(max(size, 1) for size in shape) >= 2**62:  # beyond what a tensor can have, even an empty one
                raise UserError(f"`{path}` has a tensor `{name}` of shape {list(shape)}: it is damaged")
            dtype = PACKED_DTYPES.get(kind) or FORMATS[KINDS[kind]].dtype
            data = view(mapped, 8 + size + begin, end - begin, dtype, shape)
            tensors[name] = Stored(KINDS.get(kind, kind), shape, data)
        return tensors, mapped
    except FileNotFoundError:
        raise UserError(f"`{path}` is missing: fetch it again") from None
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {error.strerror or error}") from None
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"`{path}` is not a usable safetensors file ({reason}): it is damaged or cut short") from None


def text_name(name: str) -> str:
    for prefix, replacement in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
