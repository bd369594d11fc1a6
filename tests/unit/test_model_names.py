"""Names of models: what is a hub name, a URL or a path, and which file of a repository a quantisation means."""

from __future__ import annotations

import pytest

from outrider.catalog.names import HubName, UrlName, choose_file, display_name, parse, quantization, with_revision
from outrider.errors import UserError
from outrider.kernels.quantization import FORMATS
from outrider.weights.gguf_header import TENSOR_TYPES

HUB_NAMES = {
    "org/name": HubName("org/name", ""),
    "org/name:Q4_K_M": HubName("org/name", "Q4_K_M"),
    "org/name:latest": HubName("org/name", ""),
    "hf.co/org/name:q8_0": HubName("org/name", "q8_0"),
    "huggingface.co/org/name": HubName("org/name", ""),
    "https://huggingface.co/org/name": HubName("org/name", ""),
    "https://huggingface.co/org/name/resolve/main/a/x.gguf?download=true": HubName("org/name", "a/x.gguf"),
    "https://huggingface.co/org/name/blob/main/x.gguf": HubName("org/name", "x.gguf"),
    "org/name@v1.2": HubName("org/name@v1.2", ""),
    "org/name@0123abc:Q4_K_M": HubName("org/name@0123abc", "Q4_K_M"),
    "org/name:x-Q4_0.gguf": HubName("org/name", "x-Q4_0.gguf"),
    "org/name:sub/x.gguf": HubName("org/name", "sub/x.gguf"),
    "org/name-1.5B_v2.0:UD-Q4_K_XL": HubName("org/name-1.5B_v2.0", "UD-Q4_K_XL"),
}


def test_a_revision_is_part_of_a_hub_name() -> None:
    assert with_revision("org/name", None) == "org/name"
    assert with_revision("org/name", "v1") == with_revision("hf.co/org/name@v1", "v1") == "org/name@v1"
    assert with_revision("org/name:Q4_0", "v1") == "org/name@v1:Q4_0"
    for name, revision, problem in (
        ("org/name@v2", "v1", "names another one"),
        ("smollm2-135m", "v1", "needs a model of the hub"),
        ("/tmp", "v1", "needs a model of the hub"),
        ("https://host/x.gguf", "v1", "needs a model of the hub"),
        ("org/name", "../x", "expected a branch"),
        ("org/name", "", "expected a branch"),
    ):
        with pytest.raises(UserError, match=problem):
            with_revision(name, revision)


@pytest.mark.parametrize("name", HUB_NAMES)
def test_a_hub_name(name: str) -> None:
    assert parse(name) == HUB_NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "org/name:../../x.gguf",
        "org/name:a/../x.gguf",
        "org/name:/etc/x.gguf",
        "org/name:a/b",
        "org/..:Q4_0",
        "../name:Q4_0",
        "./org/name:Q4_0",
        "/org/name:Q4_0",
        "~/name:Q4_0",
        "a/b/c:Q4_0",
        "org/name:",
        "org/name:Q4 0",
        f"org/{'n' * 300}:Q4_0",
        "org/name:..",
        "org/name@",
        "org/name@../../x",
        "org/name@..",
        "org/name@a@b",
        "org@a/name",
        "org/name\x00:Q4_0",
        "org/x.gguf",
        "C:/models/x.gguf",
        "ftp://host/x.gguf",
        "file:///etc/x.gguf",
    ],
)
def test_a_name_with_path_tricks_is_no_name(name: str) -> None:
    assert parse(name) is None


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("https://host/a/x-Q4_K_M.gguf", "x-Q4_K_M.gguf"),
        ("http://host:8080/x.gguf?key=1", "x.gguf"),
        ("https://host/..%2f..%2fx.gguf", "x.gguf"),
        ("https://host/%2e%2e%5cx.gguf", "x.gguf"),
        ("https://host/a b\u00e9.gguf", "a_b_.gguf"),
        ("https://host/...hidden.gguf", "hidden.gguf"),
        ("https://huggingface.co/org/name/resolve/dev/x.gguf", "x.gguf"),
    ],
)
def test_a_url_gives_a_plain_file_name(url: str, file: str) -> None:
    parsed = parse(url)
    assert isinstance(parsed, UrlName)
    assert parsed.file == file
    assert ".." not in parsed.folder and len(parsed.folder.split("/")) == 2


def test_urls_differ_by_their_query_but_not_by_their_password() -> None:
    plain, query, secret = (
        parse(url) for url in ("https://h/x.gguf", "https://h/x.gguf?v=2", "https://me:pass@h/x.gguf#here")
    )
    assert isinstance(plain, UrlName) and isinstance(query, UrlName) and isinstance(secret, UrlName)
    assert plain.folder != query.folder
    assert plain.folder == secret.folder and str(secret) == "https://h/x.gguf"


@pytest.mark.parametrize(
    "url", ["https://host/x.bin", "https://host/", "https://", "https://h:99999/x.gguf", "http://h/.gguf"]
)
def test_a_url_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is not the URL of a GGUF file"):
        parse(url)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("X-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Q8_0/X-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("x-fp16.gguf", "F16"),
        ("x-BF16.gguf", "BF16"),
        ("x-IQ4_XS.gguf", "IQ4_XS"),
        ("x-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("gemma-3-1b-it-qat-q4_0.gguf", "Q4_0"),
        ("model.gguf", ""),
    ],
)
def test_the_quantisation_in_a_file_name(file: str, kind: str) -> None:
    assert quantization(file) == kind


FILES = [
    "README.md",
    "X-Q4_K_M.gguf",
    "X-Q4_K_S.gguf",
    "X-Q8_0-00001-of-00002.gguf",
    "X-Q8_0-00002-of-00002.gguf",
    "X-BF16-00001-of-00003.gguf",
    "X-BF16-00003-of-00003.gguf",
    "X-UD-Q5_K_XL.gguf",
    "X-Q6_K.gguf",
    "X-UD-Q6_K.gguf",
    "X-IQ4_XS.gguf",
    "mmproj-X-F16.gguf",
    "mtp-X-Q4_K_M.gguf",
    "X.imatrix.gguf",
    "../../evil-Q5_0.gguf",
    "/etc/evil-Q5_1.gguf",
]


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "X-Q4_K_M.gguf"),
        ("q4_k_s", "X-Q4_K_S.gguf"),
        ("", "X-Q4_K_M.gguf"),
        ("Q5_K_XL", "X-UD-Q5_K_XL.gguf"),
        ("Q6_K", "X-Q6_K.gguf"),
        ("Q8_0", "X-Q8_0-00001-of-00002.gguf"),
        ("X-Q8_0-00002-of-00002.gguf", "X-Q8_0-00001-of-00002.gguf"),
        ("UD-Q6_K", "X-UD-Q6_K.gguf"),
        ("X-Q6_K.gguf", "X-Q6_K.gguf"),
    ],
)
def test_the_file_of_a_quantisation(tag: str, file: str) -> None:
    assert choose_file("org/x", FILES, tag) == file


@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ("BF16", r"`org/x:BF16` is split into 3 files, of which `X-BF16-00002-of-00003.gguf` is missing"),
        ("IQ4_XS", r"quantised as IQ4_XS, which Outrider cannot read: pick `org/x:Q4_K_M`"),
        ("Q4_K", r"no file of the quantisation `Q4_K`: pick `org/x:Q4_K_M` or `org/x:Q4_K_S`"),
        ("F16", "no file of the quantisation `F16`"),
        ("Q5_0", "no file of the quantisation `Q5_0`"),
        ("Q5_1", "no file of the quantisation `Q5_1`"),
        ("y.gguf", "no file of the quantisation `y.gguf`"),
    ],
)
def test_a_quantisation_that_cannot_be_had(tag: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        choose_file("org/x", FILES, tag)


def test_several_files_of_one_quantisation_are_named() -> None:
    with pytest.raises(UserError, match=r"can be several files: name `o/x:a-Q4_0\.gguf` or `o/x:b-Q4_0\.gguf`"):
        choose_file("o/x", ["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0")
    assert display_name("o/x", "a-Q4_0.gguf", ["a-Q4_0.gguf", "b-Q4_0.gguf"]) == "o/x:a-Q4_0.gguf"
    assert display_name("o/x", "a-Q4_0.gguf", ["a-Q4_0.gguf", "b-Q8_0.gguf"]) == "o/x:Q4_0"


def test_a_repository_without_gguf_files() -> None:
    with pytest.raises(UserError, match="the hub model `o/x` has no GGUF file"):
        choose_file("o/x", ["model.safetensors"], "Q4_0")


def test_the_default_of_a_repository() -> None:
    assert choose_file("o/x", ["x-Q8_0.gguf", "x-F16.gguf"], "") == "x-Q8_0.gguf"
    assert choose_file("o/x", ["x-F16.gguf"], "") == "x-F16.gguf"
    assert choose_file("o/x", ["model.gguf"], "") == "model.gguf"
    with pytest.raises(UserError, match="none of the defaults Q4_K_M and Q8_0: pick `o/x:F16` or `o/x:Q5_0`"):
        choose_file("o/x", ["x-F16.gguf", "x-Q5_0.gguf"], "")


@pytest.mark.parametrize("kind", [kind for kind in TENSOR_TYPES.values() if kind[0] in "qibft" and kind != "q8_1"])
def test_a_quantisation_is_refused_exactly_if_its_tensors_are(kind: str) -> None:
    files = [f"x-{kind.upper()}.gguf"]
    if kind in FORMATS:
        assert choose_file("o/x", files, kind) == files[0]
    elif quantization(files[0]):
        with pytest.raises(UserError, match="cannot read"):
            choose_file("o/x", files, kind)
