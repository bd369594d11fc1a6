"""Open the folder of a draft head: find it, read its configuration, and rename its tensors to our names."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ... import catalog
from ...errors import UserError
from ...kernels import Weight
from ...kernels.quantization import FORMATS
from ...models.fields import ConfigFields
from ...models.layers import MTP_MODULE
from ...weights import locate
from ...weights.checkpoint import Checkpoint, read_json
from ...weights.gguf_parts import single_model
from ...weights.hf_folder import normalize, read_index, single_file
from ...weights.loader import open_path
from ...weights.quantized import QuantizedMatrix, join, read_settings
from ...weights.random import HOST, is_random, open_random_head

PICKLED = "pytorch_model.bin"
PICKLES = (PICKLED, "medusa_lm_head.pt")  # read if there is no safetensors file
MASK_FILE = "mask_embedding.pt"  # beside the weights: an embedding for the mask token, and which token that is
RENAMED = (  # tensor names of other projects and ours, the longest prefix first
    (r"^(medusa_heads?\.)?(\d+)\.(\d+)\.linear\.", r"model.blocks.\2.layers.\3."),
    (r"^(medusa_heads?\.)?(\d+)\.\d+\.weight$", r"lm_heads.\2.weight"),
    (r"^medusa_heads?\.", ""),
    (r"^(model\.)?midlayer\.", "model.layers.0."),
    (r"^(model\.)?logit_head\.(markov_head|confidence_head)\.", r"model.\2."),
    (r"^(model\.)?encoder\.fc\.", "model.fc."),
    (r"^(model\.)?encoder\.output_norm_enc\.", "model.hidden_norm."),
    (r"^(model\.)?aux_norm_low\.", "model.fc_norm.0."),
    (r"^(model\.)?aux_norm_mid\.", "model.fc_norm.1."),
    (r"^(model\.)?aux_norm_high\.", "model.fc_norm.2."),
    (r"^(model\.)?(lm_head|d2t|t2d|token_map|mask_hidden|verifier_)", r"\2"),
    (r"^(?!model\.|lm_head|d2t|t2d|token_map|mask_hidden|verifier_)", "model."),
)
NEEDLESS = re.compile(r"^(t2d$|verifier_)|rotary_emb\.inv_freq$")
PACKED_FORMATS = ("q8_0", "q5_1")  # suffixes of matrices that are stored in quantized blocks


@dataclass(frozen=True)
class Packed:
    """A matrix that is stored in quantized blocks, as bytes: `NAME.q8_0` or `NAME.q5_1`, or one of a GGUF file.

    It has the shape of the matrix and can be indexed by rows, as a tensor can, until a backend takes it.
    """

    kind: str
    data: Tensor  # [N, bytes per row] uint8
    experts: int = 0  # whose matrices follow each other; 0: a single matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix (N, K), or of those of all experts (X, N / X, K)."""
        block, rows = FORMATS[self.kind], self.data.shape[0]
        columns = self.data.shape[1] // block.bytes * block.elements
        return (self.experts, rows // self.experts, columns) if self.experts else (rows, columns)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def __getitem__(self, rows: Tensor | slice) -> Packed:
        return Packed(self.kind, self.data[rows])

    def weight(self) -> Weight:
        return Weight(self.kind, self.shape, self.data)


Held = Tensor | Packed


@dataclass(frozen=True)
class Naming:
    """The tensor names of one publisher of multi-token prediction modules, stored with a model or alone."""

    whose: str
    joint: re.Pattern[str]  # the matrix that joins token and state: only modules have it
    module: re.Pattern[str]  # prefix of a name; the group is the module's number, which may start anywhere
    parts: Mapping[str, str]  # our names of the parts outside the decoder layer


NAMINGS = (
    Naming(
        "DeepSeek",
        re.compile(r"^model\.layers\.(\d+)\.eh_proj\.weight$"),
        re.compile(r"^model\.layers\.(\d+)\."),
        {
            "eh_proj": "fc",
            "enorm": "token_norm",
            "hnorm": "state_norm",
            "shared_head.norm": "norm",
            "shared_head.head": "lm_head",
            "embed_tokens": "embed_tokens",
        },
    ),
    Naming(
        "Qwen",
        re.compile(r"^model\.mtp\.fc\.weight$"),
        re.compile(r"^model\.mtp\.(?:layers\.(\d+)\.)?"),
        {
            "fc": "fc",
            "pre_fc_norm_embedding": "token_norm",
            "pre_fc_norm_hidden": "state_norm",
            "norm": "norm",
            "embed_tokens": "embed_tokens",
        },
    ),
    Naming(
        "MiMo",
        re.compile(r"^model\.mtp_layers\.(\d+)\.input_proj\.weight$"),
        re.compile(r"^model\.mtp_layers\.(\d+)\."),
        {
            "input_proj": "fc",
            "token_layernorm": "token_norm",
            "hidden_layernorm": "state_norm",
            "final_layernorm": "norm",
        },
    ),
)


@dataclass(frozen=True)
class Modules:
    """The publisher of the names, and the number of the first module in the checkpoint."""

    naming: str
    first: int


@dataclass(frozen=True)
class Folder:
    """A head folder as the readers see it: a flat configuration, and tensors under our names."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Held]
    ignored: tuple[str, ...] = ()  # tensors that are not used
    modules: Modules | None = None  # of multi-token prediction: then `tensors` holds only theirs
    is_gguf: bool = False  # norms are stored as they are, also those of models whose folders have them minus 1

    def stated(self, name: str) -> Any:
        """Return the value of a key, at the top or in `eagle_config`, else None."""
        inner = self.config.get("eagle_config") or {}
        return self.config[name] if self.config.get(name) is not None else inner.get(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.stated(name)
        return default if value is None else bool(value)

    def count(self, name: str, default: int) -> int:
        return ConfigFields({name: self.stated(name)}, {}).count(name, default)

    def columns(self, name: str) -> int:
        return self.tensors[name].shape[-1]

    def ids(self, name: str) -> Tensor:
        """Return a tensor of ids as [U] int64."""
        return _ids(self.tensors[name])


def open_source(source: str, device: torch.device = HOST) -> Folder:
    """Open a head from a folder, by its name on the hub, or with random weights, which are made on `device`."""
    if is_random(source):
        config, made = open_random_head(source, device)
        return Folder(Path(source), config, {**made})
    path = locate(source, kind="draft head")
    return open_gguf_modules(path) if is_gguf(path) else open_folder(find_folder(source))


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or the folder of one."""
    return path.is_file() or (not (path / "config.json").is_file() and single_model(path) is not None)


def find_folder(source: str) -> Path:
    """Return the local folder of a head; download it if `source` is a name on the hub."""
    path = locate(source, kind="draft head")
    bare = path.is_dir() and not list(path.glob("*.safetensors")) and find_pickle(path) is None
    if bare and not Path(source).expanduser().exists():
        path = catalog.pull_hub(source, also=(*PICKLES, MASK_FILE))
    if not path.is_dir():
        raise UserError(f"`{path}` is no draft head: pass a folder with `config.json` and weights")
    return path


def open_folder(path: Path) -> Folder:
    """Read the configuration and the tensors of a head folder."""
    if not (path / "config.json").is_file():
        raise UserError(f"`{path}` is no draft head, it has no `config.json`: pass the folder of a head")
    found, mask = _read_mask(path)
    return arrange(path, mask | read_json(path / "config.json"), _read_tensors(path) | found)


def has_modules(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint of a model contains MTP modules."""
    return any(MTP_MODULE.match(name) for name in checkpoint.names())


def open_gguf_modules(path: Path) -> Folder:
    """Read the MTP modules of a GGUF file, which has the model too, or only its embedding and head."""
    checkpoint = open_path(path)
    held = {name: _held(stored.load()) for name, stored in checkpoint.tensors.items() if name.startswith("mtp.")}
    if not held:
        raise UserError(
            f"`{path}` has no modules of multi-token prediction, the only draft heads that GGUF files hold: "
            "pass a folder with `config.json` and weights"
        )
    tensors, modules = _find_modules({f"model.{name}": tensor for name, tensor in held.items()})
    if modules is None:
        raise UserError(f"the modules of `{path}` lack a block or the matrix before it: fetch them again")
    return Folder(path, checkpoint.config, {name: _loaded(each) for name, each in tensors.items()}, (), modules, True)


def _held(weight: Weight) -> Held:
    experts = weight.shape[0] if len(weight.shape) == 3 else 0
    return Packed(weight.kind, weight.data, experts) if FORMATS[weight.kind].quantized else weight.data


def arrange(path: Path, config: dict[str, Any], found: dict[str, Tensor]) -> Folder:
    """Flatten a head's config.json and rename its tensors to our names."""
    for nest in ("transformer_layer_config", "model"):
        if isinstance(config.get(nest), dict):
            config = config | config[nest]
    if not isinstance(config.get("eagle_config") or {}, dict):
        raise UserError(f"`{path}` says `eagle_config` is {config['eagle_config']!r}: expected keys and values")
    tensors: dict[str, Held | QuantizedMatrix] = {}
    for name, tensor in _joined(path, config, found).items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    ignored = tuple(name for name in tensors if NEEDLESS.search(name))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    hollow = next((name for name, tensor in tensors.items() if not prod(tensor.shape) or not tensor.shape), None)
    if hollow is not None:
        raise UserError(
            f"`{path}` stores the tensor `{hollow}` with the shape {list(tensors[hollow].shape)}, which nothing in a "
            "head has: fetch it again"
        )
    tensors, modules = _find_modules(tensors)  # before the loading: modules may lie beside a whole model
    if modules is not None:
        config = normalize(config)  # modules of a multimodal model draft text
    _refuse_multimodal(path, config)
    held = {name: _loaded(tensor) for name, tensor in tensors.items()}
    return Folder(path, config, _split(_sorted_vocabulary(held), config), ignored, modules)


def _refuse_multimodal(path: Path, config: Mapping[str, Any]) -> None:
    for name in ("vision_config", "audio_config", "image_token_id", "image_token_index"):
        if config.get(name) is not None:
            raise UserError(f"`{path}` is for a model that reads more than text (`{name}`): take a head for text alone")


def _joined(path: Path, config: dict[str, Any], found: dict[str, Tensor]) -> dict[str, Held | QuantizedMatrix]:
    """Return the tensors by the names of their matrices: several are one matrix of a quantized checkpoint."""
    settings = read_settings(path, config)
    matrices, used = ({}, set()) if settings is None else join(settings, found)
    return {**_unpack({name: tensor for name, tensor in found.items() if name not in used}, path), **matrices}


def _loaded(tensor: Held | QuantizedMatrix) -> Held:
    if not isinstance(tensor, QuantizedMatrix):
        return tensor
    return _held(tensor.load(reorder=False))


def _read_mask(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the embedding of the mask token and its id as a key, if they have a separate file."""
    file = path / MASK_FILE
    if not file.is_file():
        return {}, {}
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # a damaged pickle can raise anything
        found = None
    embedding = found.get("embedding") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(embedding, Tensor):
        raise UserError(f"`{file}` holds no `embedding` of the mask token: fetch it again")
    return {"mask_embedding": embedding.flatten()}, {"mask_token_id": found.get("mask_token_id")}


def find_pickle(path: Path) -> Path | None:
    return next((path / name for name in PICKLES if (path / name).is_file()), None)


def _sorted_vocabulary(tensors: dict[str, Held]) -> dict[str, Held]:
    """Convert a draft vocabulary from `token_map`, ids in any order, to `d2t`, offsets of rising ids.

    Head matrices are sorted accordingly, or cut to the rows of the draft vocabulary.
    """
    if "token_map" not in tensors:
        return tensors
    ids, order = _ids(tensors["token_map"]).sort()  # [U] each
    found = {name: tensor for name, tensor in tensors.items() if name != "token_map"}
    for name, tensor in found.items():
        if name.startswith("lm_head") and tensor.shape[0] == len(ids):
            found[name] = tensor[order]
        elif name.startswith("lm_head") and len(ids) and int(ids[0]) >= 0 and int(ids[-1]) < tensor.shape[0]:
            found[name] = tensor[ids]
    return found | {"d2t": ids - torch.arange(len(ids))}


def _ids(held: Held) -> Tensor:
    assert isinstance(held, Tensor)  # only matrices are packed
    return held.to(torch.int64).flatten()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors, memory-mapped."""
    pickled = find_pickle(path)
    if pickled is not None and not list(path.glob("*.safetensors")):
        return _read_pickled(pickled)
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        with _opened(path / file) as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def _files(path: Path) -> list[str]:
    return sorted(set(read_index(path).values())) or [single_file(path)]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; refuse a damaged one."""
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise UserError(f"`{file}` is no usable safetensors file ({error}): fetch it again") from None


def _read_pickled(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"`{file}` holds more than tensors, which is unsafe to read: convert it to safetensors"
        ) from None
    except Exception:  # a damaged pickle can raise anything
        raise UserError(f"`{file}` is no usable file of tensors: it is damaged, or older than torch 1.6") from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"`{file}` holds no table of tensors: convert it to safetensors")
    return {str(name): tensor for name, tensor in found.items()}


def _split(tensors: dict[str, Held], config: Mapping[str, Any]) -> dict[str, Held]:
    """Split fused projections."""
    fields = ConfigFields(config, {})
    heads = fields.count("num_attention_heads", 1)
    kv_heads = fields.count("num_key_value_heads", heads)
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    shares = {"qkv_proj": (heads, kv_heads, kv_heads), "gate_up_proj": (1, 1)}
    split: dict[str, Held] = {}
    for name, tensor in tensors.items():
        part = next((part for part in fused if f".{part}." in name), None)
        if part is None:
            split[name] = tensor
            continue
        unit, rest = divmod(tensor.shape[0], sum(shares[part]))
        if rest:
            raise UserError(
                f"the tensor `{name}` has {tensor.shape[0]} rows, which its heads do not share evenly: "
                "config and weights are not of the same head"
            )
        first = 0
        for own, share in zip(fused[part], shares[part], strict=True):
            split[name.replace(part, own)] = tensor[first : first + unit * share]
            first += unit * share
    return split


def _unpack(found: dict[str, Tensor], path: object) -> dict[str, Held]:
    """Return the tensors of a file by the names of their matrices, without the suffix of the format."""
    held: dict[str, Held] = {}
    for name, tensor in found.items():
        plain, _, kind = name.rpartition(".")
        if kind not in PACKED_FORMATS or not plain.endswith(".weight"):
            held[name] = tensor
            continue
        if tensor.dtype != torch.uint8 or tensor.dim() != 2 or tensor.shape[1] % FORMATS[kind].bytes:
            raise UserError(
                f"`{path}` stores the tensor `{name}` as {tensor.dtype} of shape {list(tensor.shape)}, which are no "
                f"rows of {kind} blocks: fetch it again"
            )
        held[plain] = Packed(kind, tensor)
    return held


def _find_modules(
    tensors: dict[str, Held | QuantizedMatrix],
) -> tuple[dict[str, Held | QuantizedMatrix], Modules | None]:
    """Return the tensors of the modules under our names; all tensors unchanged if there is no module.

    The decoder layer of module J is `model.layers.J`; its other parts are `model.modules.J`.
    """
    for naming in NAMINGS:
        joints = [found for name in tensors if (found := naming.joint.match(name))]
        if joints:
            renamed, first = _rename_modules(tensors, naming, {int(found[1]) for found in joints if found.groups()})
            return renamed, Modules(naming.whose, first)
    return tensors, None


def _rename_modules(
    tensors: dict[str, Held | QuantizedMatrix], naming: Naming, numbers: set[int]
) -> tuple[dict[str, Held | QuantizedMatrix], int]:
    """Rename the tensors of modules, and number the modules from 0."""
    renamed: dict[str, Held | QuantizedMatrix] = {}
    shared: dict[str, Held | QuantizedMatrix] = {}  # by all modules
    found = [(match, name) for name in tensors if (match := naming.module.match(name))]
    numbers = numbers or {int(match[1]) for match, _ in found if match[1] is not None}
    order = {number: index for index, number in enumerate(sorted(numbers))}
    for match, name in found:
        rest, number = name[match.end() :], match[1]
        if number is not None and int(number) not in order:
            continue  # a layer of the model itself
        part, _, kind = rest.rpartition(".")
        index = None if number is None else order[int(number)]
        if part not in naming.parts:
            renamed[f"model.layers.{index}.{rest}"] = tensors[name]
        elif index is None:
            shared[f"{naming.parts[part]}.{kind}"] = tensors[name]
        else:
            renamed[f"model.modules.{index}.{naming.parts[part]}.{kind}"] = tensors[name]
    for index in order.values():
        renamed |= {f"model.modules.{index}.{part}": tensor for part, tensor in shared.items()}
    return renamed, min(order, default=0)


def module_tensors(tensors: Mapping[str, Held], index: int) -> dict[str, Held]:
    """Return the tensors of one module under the names of a single head."""
    block, own = f"model.layers.{index}.", f"model.modules.{index}."
    found: dict[str, Held] = {}
    for name, tensor in tensors.items():
        if name.startswith(block):
            found["model.layers.0." + name.removeprefix(block)] = tensor
        elif name.startswith(own):
            part = name.removeprefix(own)
            found[part if part.startswith("lm_head.") else f"model.{part}"] = tensor
    return found
