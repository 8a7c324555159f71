#!/usr/bin/env python3
"""Makes testdata/ from the full reference models: make_testdata.py SOURCE TARGET.

SOURCE holds models/ and golden/, TARGET is usually testdata/. Of each model only what an MoE block needs is
kept: its tensors from model.safetensors, and from captures.safetensors all but token ids, logits and routed
outputs. config.json, gradients, the seed example and the golden bits are copied byte for byte. The same input gives the
same files. tests/io/testdata_test.cc checks the result. Plain Python, no packages.
"""
import json
import pathlib
import re
import shutil
import struct
import sys

# Model -> MoE layers that are kept; None keeps all. One layer of the widest model is enough.
MODELS = {
    "deepseek_v3_tiny": None,
    "deepseek_v2_tiny": None,
    "mixtral_tiny": None,
    "qwen3_moe_tiny": {1},
    "olmoe_tiny": None,
    "qwen2_moe_tiny": None,
    "gpt_oss_tiny": None,
    "deepseek_v3_tiny_fp8": None,
    "deepseek_v3_wide_fp8": None,
    "gpt_oss_tiny_mxfp4": None,
}
# Models whose gradients are kept: a few hundred KiB each.
GRADIENTS = ("deepseek_v3_tiny", "deepseek_v2_tiny", "mixtral_tiny", "olmoe_tiny", "qwen2_moe_tiny", "gpt_oss_tiny")
COPIES = ["models/seed_example/seed_example.safetensors", "golden/dot_orders.safetensors"]
MOE_TENSOR = re.compile(r"\.layers\.(\d+)\.(mlp\.(experts|gate|router|shared_experts?|shared_expert_gate)|block_sparse_moe)\.")
CAPTURE = re.compile(
    r"layers\.(\d+)\.(moe_input|router_logits|topk_idx|topk_weights|moe_output)$")
ALIGNMENT = 64


def read(path):
    """Returns {name: (dtype, shape, bytes)}."""
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8:8 + length])
    header.pop("__metadata__", None)
    data = blob[8 + length:]
    return {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items()}


def write(path, tensors):
    """Wide types first, then by name: every tensor starts at a multiple of its element size."""
    width = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
    names = sorted(tensors, key=lambda name: (-width[tensors[name][0]], name))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors[n][2] for n in names))


def select(tensors, pattern, layers):
    kept = {}
    for name, tensor in tensors.items():
        match = pattern.search(name)
        if match and (layers is None or int(match.group(1)) in layers):
            kept[name] = tensor
    return kept


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: make_testdata.py SOURCE TARGET")
    source, target = map(pathlib.Path, sys.argv[1:])
    for model, layers in MODELS.items():
        origin, folder = source / "models" / model, target / "models" / model
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin / "config.json", folder / "config.json")
        for file, pattern in (("model", MOE_TENSOR), ("captures", CAPTURE)):
            name = file + ".safetensors"
            write(folder / name, select(read(origin / name), pattern, layers))
    for model in GRADIENTS:
        name = pathlib.Path("models", model, "grads.safetensors")
        shutil.copyfile(source / name, target / name)
    for name in COPIES:
        path = target / name.removeprefix("models/")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, path)


if __name__ == "__main__":
    main()
