#!/usr/bin/env python3
"""Makes testdata/formats/formats.safetensors with ml_dtypes: make_formats_golden.py TARGET (usually testdata/formats).

A second opinion on the number formats, from formulas that Argosy does not share: ml_dtypes' tables and casts, and the
block rules written in numpy the way public systems write them (DeepSeek's act_quant with fp32 and with power-of-two
scales, its weight blocks of 128 x 128, OCP MX with the floor rule, Transformer Engine's ceil rule). The same
versions give the same file; tests/quant/golden_test.cc reads it. Needs numpy and ml_dtypes; the tests do not.
"""
import json
import pathlib
import struct
import sys

import ml_dtypes
import numpy as np

ELEMENTS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
ALIGNMENT = 64
DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}


def write(path, tensors):
    """Wide types first, then by name: every tensor starts at a multiple of its element size."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    versions = {"numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__}
    header, data, offset = {"__metadata__": versions}, [], 0
    for name in names:
        blob = np.ascontiguousarray(tensors[name]).tobytes()
        header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape),
                        "data_offsets": [offset, offset + len(blob)]}
        data.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def cast(values, element):
    with np.errstate(all="ignore"):
        return values.astype(np.float32).astype(ELEMENTS[element]).view(np.uint8)


def saturating(values, element):
    return cast(np.clip(values, -LARGEST[element], LARGEST[element]), element)


def hard_values(element):
    """All midpoints between neighbours and their fp32 neighbours, every exponent with a few mantissas, both signs."""
    codes = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
    finite = codes.view(ELEMENTS[element]).astype(np.float64)
    finite = np.unique(np.abs(finite[np.isfinite(finite)]))
    middles = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    around = [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))]
    fields = np.arange(255, dtype=np.uint32) << 23
    for mantissa in (0, 1, 0x400000, 0x680000, 0x7FFFFF):
        around.append((fields | mantissa).view(np.float32))
    values = np.concatenate(around)
    return np.concatenate([values, -values])


def random_rows(rng, rows, cols):
    """Rows of different magnitudes; some blocks are powers of two times 1.75, where the rules change."""
    values = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-6, 7, (rows, 1)))
    borders = np.exp2(rng.integers(-3, 4, (rows, cols))) * rng.choice([1.0, 1.5, 1.75, 1.76], (rows, cols))
    values = np.where(np.arange(cols) // 64 % 4 == 3, borders, values)
    return values.astype(np.float32)


def blocks_of(values, size):
    return values.reshape(values.shape[0], -1, size)


def act_quant(x, power_of_two):
    """DeepSeek's kernel: scale = amax / 448 (or the power of two above it), code = x / scale."""
    blocks = blocks_of(x, 128)
    scale = (np.abs(blocks).max(axis=-1) / np.float32(448.0)).astype(np.float32)
    if power_of_two:
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    codes = saturating((blocks / scale[..., None]).astype(np.float32), "e4m3")
    return codes.reshape(x.shape), scale


def weight_quant(w):
    """128 x 128, the last block of each side partial."""
    scales = np.empty((-(-w.shape[0] // 128), -(-w.shape[1] // 128)), np.float32)
    codes = np.empty(w.shape, np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = np.abs(w[at]).max() / np.float32(448.0)
            codes[at] = saturating(w[at] / scales[i, j], "e4m3")
    return codes, scales


def mx_quant(x, element, ceil):
    blocks = blocks_of(x, 32)
    amax = np.abs(blocks).max(axis=-1).astype(np.float64)
    exponent = np.floor(np.log2(amax)) - np.floor(np.log2(LARGEST[element]))
    if ceil:
        exponent = np.ceil(np.log2(amax / LARGEST[element]))
    codes = saturating((blocks * np.exp2(-exponent)[..., None]).astype(np.float32), element).reshape(x.shape)
    if element == "e2m1":
        codes = (codes[:, 0::2] & 0xF) | (codes[:, 1::2] << 4)
    return codes.astype(np.uint8), (exponent + 127).astype(np.uint8)


def main():
    tensors = {}
    for element in ELEMENTS:
        codes = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
        tensors[f"{element}.values"] = codes.view(ELEMENTS[element]).astype(np.float32)
        tensors[f"{element}.inputs"] = hard_values(element)
        tensors[f"{element}.codes"] = cast(tensors[f"{element}.inputs"], element)
        tensors[f"{element}.saturated"] = saturating(tensors[f"{element}.inputs"], element)
    tensors["e8m0.values"] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    x = random_rows(np.random.default_rng(20260817), 6, 512)
    tensors["x"] = x
    tensors["w"] = random_rows(np.random.default_rng(20260818), 160, 192)[:, :160]
    tensors["e4m3_1x128.codes"], tensors["e4m3_1x128.scales"] = act_quant(x, False)
    codes, scale = act_quant(x, True)
    tensors["e4m3_1x128_e8m0.codes"] = codes
    tensors["e4m3_1x128_e8m0.scales"] = scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    tensors["e4m3_128x128.codes"], tensors["e4m3_128x128.scales"] = weight_quant(tensors["w"])
    for name, element, ceil in (("mxfp8", "e4m3", False), ("mxfp8_ceil", "e4m3", True), ("mxfp4", "e2m1", False)):
        tensors[f"{name}.codes"], tensors[f"{name}.scales"] = mx_quant(x, element, ceil)
    target = pathlib.Path(sys.argv[1]) / "formats.safetensors"
    write(target, tensors)


if __name__ == "__main__":
    main()
