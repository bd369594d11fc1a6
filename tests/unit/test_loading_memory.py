"""Loading holds the packed weights and little more: what was read of the file is given back layer by layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

LOAD = """
import sys
from pathlib import Path
import torch
from outrider import kernels, models, weights

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

ops = kernels.load("cpu")
kernels.cpu.matrix(kernels.Weight("f32", (16, 16), torch.zeros(16, 16)))
before = kilobytes("VmHWM:")
model = models.build(weights.open_checkpoint(sys.argv[1]), ops)
print((kilobytes("VmHWM:") - before) * 1024 / model.weight_bytes)
"""


def make_folder(folder: Path) -> None:
    """About 90 MB of bf16 in six layers: far more than what imports leave lying about."""
    width, inner, vocabulary, layers = 768, 2048, 4096, 6
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (width, inner)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    save_file({k: torch.ones(s, dtype=torch.bfloat16) for k, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        f"""{{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": {vocabulary},
        "hidden_size": {width}, "intermediate_size": {inner}, "num_hidden_layers": {layers}, "num_attention_heads": 12,
        "num_key_value_heads": 12, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true}}"""
    )


def test_peak_memory_stays_under_twice_the_weights(tmp_path: Path) -> None:
    make_folder(tmp_path)
    found = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True)
    assert 0.9 < float(found.stdout) < 1.6, found.stdout
