"""Inputs of the comparison and the layer in float64. Arrays of bfloat16 are uint16 bit patterns.

Test: compare.py holds every peer, Argosy among them, against `reference` before it times anything.
"""

import dataclasses
import pathlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


FULL = Shape(hidden=2048, intermediate=1024, num_experts=32, top_k=4)
SMALL = Shape(hidden=256, intermediate=128, num_experts=8, top_k=2)
CHECKED_TOKENS = 16  # of a full-size batch


def to_bits(values):
    """float32 -> bfloat16 bits, rounded to nearest even."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def normal_bits(rng, shape, deviation):
    return to_bits(rng.standard_normal(shape, np.float32) * np.float32(deviation))


def make_weights(shape, seed):
    """gate_up [E, 2F, H] (gate rows first) and down [E, H, F]; outputs of products are about 1."""
    rng = np.random.default_rng(seed)
    gate_up = np.empty((shape.num_experts, 2 * shape.intermediate, shape.hidden), np.uint16)
    down = np.empty((shape.num_experts, shape.hidden, shape.intermediate), np.uint16)
    for expert in range(shape.num_experts):
        gate_up[expert] = normal_bits(rng, gate_up.shape[1:], shape.hidden ** -0.5)
        down[expert] = normal_bits(rng, down.shape[1:], shape.intermediate ** -0.5)
    return gate_up, down


def make_tokens(num_tokens, shape, seed):
    return normal_bits(np.random.default_rng(seed), (num_tokens, shape.hidden), 1.0)


def make_routing(num_tokens, shape, seed, closed=(), top_k=None):
    """top_k different experts a token, none of `closed`, weights that sum to 1."""
    rng = np.random.default_rng(seed)
    top_k = top_k or shape.top_k
    keys = rng.random((num_tokens, shape.num_experts))
    keys[:, list(closed)] = 2.0
    experts = np.argsort(keys, axis=1)[:, :top_k].astype(np.int32)
    weights = 0.1 + rng.random((num_tokens, top_k), np.float32)
    return experts, weights / weights.sum(axis=1, keepdims=True)


def num_routings(num_tokens):
    """Small batches change their experts from call to call, so that no cache holds them."""
    return 8 if num_tokens <= 64 else 1


def reference(x, gate_up, down, experts, weights):
    rows = to_float(x).astype(np.float64)
    out = np.zeros_like(rows)
    width = down.shape[2]
    for expert in np.unique(experts):
        token, place = np.nonzero(experts == expert)
        product = rows[token] @ to_float(gate_up[expert]).astype(np.float64).T
        gate, up = product[:, :width], product[:, width:]
        hidden = gate / (1 + np.exp(-gate)) * up
        result = hidden @ to_float(down[expert]).astype(np.float64).T
        np.add.at(out, token, result * weights[token, place, None])
    return out


def relative_error(got, want):
    """Largest error over the largest value; 0 where there is no error, NaN where one is none."""
    error = np.abs(got - want).max(initial=0.0)
    return float(error / np.abs(want).max()) if error != 0 else 0.0


def relative_rms(got, want):
    """Rms of the error over rms of the values; 0 for no tokens."""
    if want.size == 0:
        return 0.0
    return float(np.sqrt(np.square(got - want).sum() / np.square(want).sum()))


def check_cases():
    """name -> (x, experts, weights) on SMALL: what users meet and some peers do not survive."""
    every = range(SMALL.num_experts)
    routings = {
        "random": (64, make_routing(64, SMALL, 1)),
        "empty experts": (64, make_routing(64, SMALL, 2, closed=(0, 3, 7))),
        "one pair": (64, make_routing(64, SMALL, 3, closed=[e for e in every if e not in (3, 4)])),
        "T=1": (1, make_routing(1, SMALL, 4)),
        "one expert": (64, make_routing(64, SMALL, 5, closed=[e for e in every if e != 2], top_k=1)),
        "T=0": (0, make_routing(0, SMALL, 6)),
    }
    return {name: (make_tokens(count, SMALL, 30 + count), *routing)
            for name, (count, routing) in routings.items()}


def save_full(folder, counts, checked):
    """The full-size inputs, once for all workers, which map them; for T in `checked` the reference of the first
    CHECKED_TOKENS."""
    folder = pathlib.Path(folder)
    gate_up, down = make_weights(FULL, 1)
    np.save(folder / "gate_up.npy", gate_up)
    np.save(folder / "down.npy", down)
    for count in counts:
        np.save(folder / f"x_{count}.npy", make_tokens(count, FULL, 100 + count))
        for i in range(num_routings(count)):
            experts, weights = make_routing(count, FULL, 200 + i)
            np.save(folder / f"experts_{count}_{i}.npy", experts)
            np.save(folder / f"weights_{count}_{i}.npy", weights)
    for count in checked:
        x, experts, weights = (load(folder, name)[:CHECKED_TOKENS]
                               for name in (f"x_{count}", f"experts_{count}_0", f"weights_{count}_0"))
        np.save(folder / f"want_{count}.npy", reference(x, gate_up, down, experts, weights))


def load(folder, name, writable=False):
    return np.load(pathlib.Path(folder) / f"{name}.npy", mmap_mode=None if writable else "r")
