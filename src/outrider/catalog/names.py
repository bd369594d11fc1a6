"""Names of models: of the catalog, of the hub with or without a quantisation, or URLs of GGUF files.

A hub name is `org/name`, `org/name:Q4_K_M` or `org/name:FILE.gguf`; `hf.co/` may precede it. `org/name@REVISION` is a
branch, a tag or a commit of a repository.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ..errors import UserError
from .entries import CATALOG

MAIN = "main"  # the branch that a hub name means without a revision
PART = r"\w[\w.-]*"  # so `./name`, `../name`, `/name` and `~/name` are paths
HUB_NAME = re.compile(
    rf"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?(?P<repository>{PART}/{PART}?(?:@{PART})?)(?::(?P<tag>{PART}(?:/{PART})*))?",
    re.ASCII,
)
HUB_URL = re.compile(
    rf"https://(?:hf\.co|huggingface\.co)/(?P<repository>{PART}/{PART})/(?:resolve|blob)/main/(?P<file>{PART}(?:/{PART})*)",
    re.ASCII,
)
RANDOM = "random/"  # names that begin with it are models with random weights, not of the hub
FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
SAFE_FILE = re.compile(rf"{PART}(?:/{PART})*\.gguf", re.ASCII | re.IGNORECASE)
ASIDE = ("mmproj", "mtp-")  # beginnings of the names of files beside a model: for images, for drafts
UNSAFE = re.compile(r"[^\w.+-]", re.ASCII)
URL_CHARACTERS = "%/:=&?~+!$,;'@()*[]"  # that are left as they are
MAX_FILE_NAME = 120  # characters of a part of a name; file systems allow 255 bytes

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d_\w+?|TQ\d_\d|MXFP4\w*?|NVFP4|BF16|FP?16|FP?32))(?=[-.]|$)", re.IGNORECASE
)
# Quantisations whose tensors the GGUF reader knows.
READABLE = re.compile(r"(?:UD-)?(?:Q[45]_[01]|Q8_0|Q[456]_K(?:_[A-Z]+)?|IQ4_NL|MXFP4(?:_MOE)?|BF16|FP?16|FP?32)")
DEFAULTS = ("Q4_K_M", "Q8_0")  # picked in this order if a name states no quantisation; llama.cpp does the same


@dataclass(frozen=True)
class HubName:
    repository: str  # `org/name` or `org/name@REVISION`
    tag: str  # a quantisation or a file; empty: safetensors, or the default quantisation

    @property
    def is_file(self) -> bool:
        return self.tag.lower().endswith(".gguf")

    def __str__(self) -> str:
        return f"{self.repository}:{self.tag}" if self.tag else self.repository


@dataclass(frozen=True)
class UrlName:
    url: str

    @property
    def file(self) -> str:
        """Return a file name without folders, from the last part of the path."""
        last = unquote(urlsplit(self.url).path).replace("\\", "/").rsplit("/", 1)[-1]
        return UNSAFE.sub("_", last).lstrip(".")[-MAX_FILE_NAME:]

    @property
    def folder(self) -> str:
        """Return the folder of this URL in the cache, one for each URL."""
        host = UNSAFE.sub("_", urlsplit(self.url).hostname or "").lstrip(".")
        key = hashlib.sha256(str(self).encode()).hexdigest()[:16]
        return f"{host[:MAX_FILE_NAME]}/{key}"

    @property
    def user(self) -> str:
        """Return `user:password` of the URL; empty if it has none."""
        return unquote(urlsplit(self.url).netloc.rpartition("@")[0])

    def __str__(self) -> str:
        """Return the URL without user name, password and fragment, with special characters quoted."""
        parts = urlsplit(self.url)
        path, query = quote(parts.path, safe=URL_CHARACTERS), quote(parts.query, safe=URL_CHARACTERS)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, query, ""))


def parse(name: str) -> HubName | UrlName | None:
    """Return what a name that is no file or folder can mean; None if it is written as a path."""
    if match := HUB_URL.fullmatch(name.partition("?")[0]):
        return HubName(match["repository"], match["file"])
    if name.lower().startswith(("http://", "https://")):
        return _parse_url(name)
    match = HUB_NAME.fullmatch(name)
    if match is None or match["repository"].endswith(FILE_SUFFIXES) or name.startswith(RANDOM):
        return None
    tag = match["tag"] or ""
    if ("/" in tag and not SAFE_FILE.fullmatch(tag)) or max(map(len, re.split("[/:]", name))) > MAX_FILE_NAME:
        return None
    return HubName(match["repository"], "" if tag == "latest" else tag)


def _parse_url(name: str) -> HubName | UrlName:
    if match := HUB_NAME.fullmatch(name):
        return HubName(match["repository"], match["tag"] or "")
    try:
        parts = urlsplit(name)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or not unquote(parts.path).lower().endswith(".gguf") or UrlName(name).file.lower() == "gguf":
        raise UserError(f"`{name}` is not the URL of a GGUF file: it must end in `.gguf`")
    return UrlName(name)


def split_revision(repository: str) -> tuple[str, str]:
    """Split `org/name@REVISION`; the revision is empty if there is none."""
    name, _, revision = repository.partition("@")
    return name, revision


def with_revision(name: str, revision: str | None) -> str:
    """Return a hub name that means this branch, tag or commit of its repository."""
    if revision is None:
        return name
    if not re.fullmatch(PART, revision, re.ASCII):
        raise UserError(f"`revision` is `{revision}`: expected a branch, a tag or a commit, without `/`")
    parsed = None if name in CATALOG or Path(name).expanduser().exists() else parse(name)
    if not isinstance(parsed, HubName):
        raise UserError(f"`revision` needs a model of the hub, `org/name`, and the model is `{name}`: leave it out")
    repository, stated = split_revision(parsed.repository)
    if stated not in ("", revision):
        raise UserError(f"`revision` is `{revision}`, and `{name}` names another one: pass only one of them")
    return str(HubName(f"{repository}@{revision}", parsed.tag))


def is_hub_name(name: str) -> bool:
    """Return True if a name that is no file or folder can be a repository of the hub."""
    parsed = HUB_NAME.fullmatch(name)
    return parsed is not None and not parsed["tag"] and not name.endswith(FILE_SUFFIXES)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the part of an error that names the closest models of the catalog."""
    close = difflib.get_close_matches(name.lower().replace(":", "-"), known, n=3, cutoff=0.5)
    listed = "`outrider list --catalog` shows all"
    return f"did you mean {' or '.join(f'`{each}`' for each in close)}? {listed}" if close else listed


# ---- the file of a quantisation ----


def quantization(file: str) -> str:
    """Return the quantisation that the name of a GGUF file states, in capitals; empty if it states none."""
    stem = SPLIT.sub("", PurePosixPath(file).stem)
    found = QUANTIZATION.findall(stem)
    return found[-1].upper().replace("FP16", "F16").replace("FP32", "F32") if found else ""


def choose_file(repository: str, files: Iterable[str], tag: str) -> str:
    """Return the GGUF file of a quantisation, or of the default one; refuse what the engine cannot read.

    Of a file that is split, return the first part.
    """
    models = [file for file in files if _is_model(file)]
    if not models:
        raise UserError(f"the hub model `{repository}` has no GGUF file: name it without `:{tag}`, or another one")
    matches = _matches(models, tag) if tag else _defaults(models)
    name = HubName(repository, tag)
    if not matches:
        wanted = f"no file of the quantisation `{tag}`" if tag else f"none of the defaults {' and '.join(DEFAULTS)}"
        raise UserError(f"`{repository}` has {wanted}: {_choices(repository, models)}")
    if len({_whole_name(file) for file in matches}) > 1:
        named = " or ".join(f"`{repository}:{file}`" for file in sorted(matches)[:4])
        raise UserError(f"`{name}` can be several files: name {named}")
    file = split_parts(sorted(matches)[0])[0]
    missing = sorted(set(split_parts(file)).difference(models))
    if missing:
        raise UserError(f"`{name}` is split into {len(split_parts(file))} files, of which `{missing[0]}` is missing")
    kind = quantization(file)
    if kind and not READABLE.fullmatch(kind):
        raise UserError(f"`{name}` is quantised as {kind}, which Outrider cannot read: {_choices(repository, models)}")
    return file


def split_parts(file: str) -> list[str]:
    """Return the names of all parts of a split GGUF file, given any; of a file that is not split, its own."""
    path = PurePosixPath(file)
    split = SPLIT.search(path.stem)
    if split is None or not int(split[2]):
        return [file]
    stem, parts = SPLIT.sub("", path.stem), range(1, int(split[2]) + 1)
    return [str(path.with_name(f"{stem}-{part:05d}-of-{split[2]}{path.suffix}")) for part in parts]


def _whole_name(file: str) -> str:
    """Return the path of a GGUF file without the number of its part."""
    return SPLIT.sub("", str(PurePosixPath(file).with_suffix("")))


def _is_model(file: str) -> bool:
    base = PurePosixPath(file).name.lower()
    return bool(SAFE_FILE.fullmatch(file)) and not base.startswith(ASIDE) and "imatrix" not in base


def _matches(models: list[str], tag: str) -> list[str]:
    if tag.lower().endswith(".gguf"):
        return [file for file in models if file == tag]
    wanted = tag.upper()
    for kind in (wanted, f"UD-{wanted}"):  # UD-: Unsloth's mixtures
        if found := [file for file in models if quantization(file) == kind]:
            return found
    ending = re.compile(rf"(?:^|.*[-._/]){re.escape(tag)}", re.IGNORECASE)
    return [file for file in models if ending.fullmatch(SPLIT.sub("", PurePosixPath(file).stem))]


def _defaults(models: list[str]) -> list[str]:
    for kind in DEFAULTS:
        if found := [file for file in models if quantization(file) == kind]:
            return found
    return models if len(models) == 1 else []


def _choices(repository: str, models: list[str]) -> str:
    whole = (file for file in models if set(split_parts(file)) <= set(models))
    usable = {kind for file in whole if READABLE.fullmatch(kind := quantization(file))}
    if not usable:
        return "it has no other that can be read"
    return f"pick {' or '.join(f'`{repository}:{kind}`' for kind in sorted(usable))}"


def display_name(repository: str, file: str, others: Mapping[str, object] | Iterable[str] = ()) -> str:
    """Return the shortest name that picks `file` among the files of its repository."""
    kind = quantization(file)
    if kind and {_whole_name(each) for each in {*others, file} if quantization(each) == kind} == {_whole_name(file)}:
        return f"{repository}:{kind}"
    return f"{repository}:{file}"
