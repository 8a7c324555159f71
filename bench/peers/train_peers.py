"""Implementations of a training step: the layer with its router, forward and backward with all gradients.

    peer = Peer(gate, gate_up, down, top_k)  packs the weights as its makers do at load time
    call = peer.prepare(x, d_output)         converts inputs; not timed
    out  = peer.run(call)                    timed
    peer.result(call, out, experts)          train_data.KINDS -> float32; expert weights' of `experts` alone

Imports happen inside the classes: a worker loads only the library that it measures.
"""

import ctypes
import math
import os

import numpy as np

import layer_data
import peers


class Argosy:
    """MoeLayer::forward_train and backward (argosy_train_peer.cc); gradients of weights are fp32."""

    def __init__(self, gate, gate_up, down, top_k):
        self.lib = ctypes.CDLL(str(peers.HOME / "build/argosy/libargosy_peer.so"))
        self.lib.argosy_train_create.restype = ctypes.c_void_p
        self.lib.argosy_train_gradient.restype = ctypes.POINTER(ctypes.c_float)
        self.error = ctypes.create_string_buffer(2000)
        self.num_experts, self.hidden, self.width = down.shape
        shape = (ctypes.c_int64 * 4)(self.num_experts, top_k, self.hidden, self.width)
        self.handle = ctypes.c_void_p(self.lib.argosy_train_create(
            shape, peers.pointer(gate), peers.pointer(gate_up), peers.pointer(down), self.error, len(self.error)))
        if not self.handle:
            raise RuntimeError(self.error.value.decode())

    def prepare(self, x, d_output):
        return np.ascontiguousarray(x), np.ascontiguousarray(d_output), np.empty_like(x), np.empty_like(x)

    def run(self, call):
        if self.lib.argosy_train_step(self.handle, ctypes.c_int64(len(call[0])), *map(peers.pointer, call), self.error,
                                      len(self.error)):
            raise RuntimeError(self.error.value.decode())

    def result(self, call, out, experts):
        wide, tall = (self.width, self.hidden), (self.hidden, self.width)
        shapes = [(self.hidden,), wide, wide, tall]
        d_gate, d_expert_gate, d_expert_up, d_down = (
            np.ctypeslib.as_array(self.lib.argosy_train_gradient(self.handle, at), (self.num_experts, *shape))
            for at, shape in enumerate(shapes))
        return {"output": layer_data.to_float(call[2]), "d_hidden": layer_data.to_float(call[3]), "d_gate": d_gate,
                "d_gate_up": np.concatenate([d_expert_gate[experts], d_expert_up[experts]], axis=1),
                "d_down": d_down[experts]}


class TorchStep:
    """Autograd over a forward; subclasses have experts_of. The router is the formula of transformers, in fp32."""

    def __init__(self, gate, gate_up, down, top_k):
        import torch
        torch.set_num_threads(1)
        self.torch, self.top_k = torch, top_k
        self.gate = torch.from_numpy(layer_data.to_float(gate)).requires_grad_()
        self.load(self.tensor(gate_up), self.tensor(down))

    def tensor(self, bits):
        return self.torch.from_numpy(np.array(bits).view(np.int16)).view(self.torch.bfloat16)

    def load(self, gate_up, down):
        self.gate_up, self.down = gate_up.requires_grad_(), down.requires_grad_()

    def parameters(self):
        return [self.gate, self.gate_up, self.down]

    def prepare(self, x, d_output):
        return self.tensor(x).requires_grad_(), self.tensor(d_output)

    def route(self, x):
        torch = self.torch
        scores = torch.softmax(x.float() @ self.gate.T, dim=-1)
        weights, experts = torch.topk(scores, self.top_k, dim=-1)
        return experts, weights / weights.sum(dim=-1, keepdim=True)

    def activate(self, product):
        gate, up = product.chunk(2, dim=-1)
        return self.torch.nn.functional.silu(gate) * up

    def run(self, call):
        x, d_output = call
        for leaf in (x, *self.parameters()):
            leaf.grad = None
        experts, weights = self.route(x)
        out = self.experts_of(x, experts, weights)
        out.backward(d_output)
        return out

    def result(self, call, out, experts):
        return {"output": out.detach().float().numpy(), "d_hidden": call[0].grad.float().numpy(),
                "d_gate": self.gate.grad.numpy(), "d_gate_up": self.of(self.gate_up, experts),
                "d_down": self.of(self.down, experts)}

    def of(self, parameter, experts):
        return parameter.grad[experts].float().numpy()


class TorchLoop(TorchStep):
    """The loop that users write, one Parameter an expert and matrix: indexing a stacked one costs a stacked gradient."""

    def load(self, gate_up, down):
        self.gate_up, self.down = ([part.clone().requires_grad_() for part in whole] for whole in (gate_up, down))

    def parameters(self):
        return [self.gate, *self.gate_up, *self.down]

    def experts_of(self, x, experts, weights):
        torch = self.torch
        linear = torch.nn.functional.linear
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in torch.unique(experts).tolist():
            token, place = torch.where(experts == expert)
            row = linear(self.activate(linear(x[token], self.gate_up[expert])), self.down[expert])
            out = out.index_add(0, token, row.float() * weights[token, place].unsqueeze(1))
        return out.to(x.dtype)

    def of(self, parameter, experts):
        none = self.torch.zeros_like(parameter[0])
        grads = [parameter[e].grad if parameter[e].grad is not None else none for e in experts]
        return self.torch.stack([grad.detach() for grad in grads]).float().numpy()


class TorchGroupedMm(TorchStep):
    def experts_of(self, x, experts, weights):
        return peers.by_grouped_mm(self.torch, self.activate, self.gate_up, self.down, x, experts, weights)


class KtKernelSft(TorchStep):
    """KTransformers' fine-tuning class with gradients of all weights, as its wrapper calls it; the router is torch's.
    Its worker is bound to core 0, the caller goes to the next core."""

    def load(self, gate_up, down):
        import kt_kernel  # noqa: F401
        from kt_kernel import kt_kernel_ext as ext
        torch = self.torch
        num_experts, double, hidden = gate_up.shape
        width = double // 2
        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [1]
        self.cpu = ext.CPUInfer(pool)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        self.parts = [gate_up[:, :width].contiguous(), gate_up[:, width:].contiguous(), down.contiguous()]
        self.ids = torch.arange(num_experts)
        config = ext.moe.MOESFTConfig()
        config.expert_num, config.num_experts_per_tok = num_experts, self.top_k
        config.hidden_size, config.intermediate_size = hidden, width
        config.lora_rank, config.max_cache_depth, config.max_len, config.layer_idx = 0, 1, 4096, 0
        config.full_weight_grad = True
        config.physical_to_logical_map = self.ids.data_ptr()
        config.gate_proj, config.up_proj, config.down_proj = (part.data_ptr() for part in self.parts)
        config.pool = self.cpu.backend_
        self.layer = ext.moe.AMXBF16_SFT_MOE(config)  # AVX512_BF16 where there is no AMX
        self.do(self.layer.load_weights_task())
        self.grads = [torch.full_like(part, math.nan) for part in self.parts]

    def do(self, task):
        self.cpu.submit(task)
        self.cpu.sync()

    def parameters(self):
        return [self.gate]

    def prepare(self, x, d_output):
        tensors = super().prepare(x, d_output)
        torch = self.torch
        count = torch.tensor([len(x)], dtype=torch.int32)
        return (*tensors, count, torch.empty_like(tensors[1]), torch.empty_like(tensors[1]),
                torch.empty(len(x), self.top_k))

    def run(self, call):
        x, d_output, count, out, d_x, d_weights = call
        x.grad = self.gate.grad = None
        experts, weights = self.route(x)
        self.do(self.layer.forward_sft_task(count.data_ptr(), self.top_k, experts.data_ptr(),
                                            weights.detach().data_ptr(), x.data_ptr(), out.data_ptr(), True))
        self.do(self.layer.backward_task(d_output.data_ptr(), d_x.data_ptr(), 0, 0, 0, 0, 0, 0, d_weights.data_ptr(),
                                         *(grad.data_ptr() for grad in self.grads)))
        weights.backward(d_weights)
        x.grad += d_x
        return out

    def result(self, call, out, experts):
        gate, up, down = (grad[experts].float().numpy() for grad in self.grads)
        return {"output": out.float().numpy(), "d_hidden": call[0].grad.float().numpy(),
                "d_gate": self.gate.grad.numpy(), "d_gate_up": np.concatenate([gate, up], axis=1), "d_down": down}


class JaxStep:
    """jax.vjp under jit; subclasses have experts_of. Weights lie [E, in, out]."""
    is_slow = False

    def __init__(self, gate, gate_up, down, top_k):
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax
        import jax.numpy as jnp
        self.jax, self.jnp, self.top_k = jax, jnp, top_k
        self.weights = (jnp.asarray(layer_data.to_float(gate)), self.array(gate_up.transpose(0, 2, 1)),
                        self.array(down.transpose(0, 2, 1)))

    def array(self, bits):
        return self.jnp.asarray(layer_data.to_float(np.ascontiguousarray(bits)), self.jnp.bfloat16)

    def layer(self, x, gate, gate_up, down):
        scores = self.jax.nn.softmax(x.astype(self.jnp.float32) @ gate.T)
        weights, experts = self.jax.lax.top_k(scores, self.top_k)
        return self.experts_of(x, gate_up, down, experts, weights / weights.sum(axis=-1, keepdims=True))

    def activate(self, product):
        gate, up = self.jnp.split(product, 2, -1)
        return self.jax.nn.silu(gate) * up

    def step(self, x, d_output, *weights):
        out, pull = self.jax.vjp(self.layer, x, *weights)
        return (out, *pull(d_output))

    def prepare(self, x, d_output):
        arrays = (self.array(x), self.array(d_output), *self.weights)
        compiled = self.jax.jit(self.step).lower(*arrays).compile()
        needed = compiled.memory_analysis().temp_size_in_bytes
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free:
            raise MemoryError(f"the step asks for {needed / 1e9:.1f} GB of temporaries, {free / 1e9:.1f} GB are free")
        return compiled, arrays

    def run(self, call):
        compiled, arrays = call
        return self.jax.block_until_ready(compiled(*arrays))

    def result(self, call, out, experts):
        output, d_x, d_gate, d_gate_up, d_down = out
        index = self.jnp.asarray(experts, self.jnp.int32)
        wide, tall = (np.asarray(grad[index], np.float32).transpose(0, 2, 1) for grad in (d_gate_up, d_down))
        return {"output": np.asarray(output, np.float32), "d_hidden": np.asarray(d_x, np.float32),
                "d_gate": np.asarray(d_gate), "d_gate_up": wide, "d_down": tall}


class JaxRaggedDot(JaxStep):
    """Rows sorted by expert, jax.lax.ragged_dot twice: dense over all experts on CPU, so minutes a step."""
    is_slow = True

    def experts_of(self, x, gate_up, down, experts, weights):
        jax, jnp = self.jax, self.jnp
        flat = experts.reshape(-1)
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=len(down)).astype(jnp.int32)
        token = order // self.top_k
        hidden = self.activate(jax.lax.ragged_dot(x[token], gate_up, sizes))
        rows = jax.lax.ragged_dot(hidden, down, sizes).astype(jnp.float32) * weights.reshape(-1)[order, None]
        return jnp.zeros(x.shape, jnp.float32).at[token].add(rows).astype(x.dtype)


class JaxPadded(JaxStep):
    """Rows in E x capacity places, two batched einsums. Capacity is 1.25 of the mean load, which drops nothing of the
    balanced routing here; T for small batches."""

    def experts_of(self, x, gate_up, down, experts, weights):
        jnp = self.jnp
        num_tokens, num_experts = len(x), len(down)
        mean = num_tokens * self.top_k / num_experts
        capacity = math.ceil(1.25 * mean) if num_tokens >= 512 else max(1, num_tokens)
        flat = experts.reshape(-1)
        one_hot = self.jax.nn.one_hot(flat, num_experts, dtype=jnp.int32)
        place = jnp.take_along_axis(jnp.cumsum(one_hot, 0) - 1, flat[:, None], 1)[:, 0]
        slot = jnp.where(place < capacity, flat * capacity + place, num_experts * capacity)
        rows = jnp.zeros((num_experts * capacity, x.shape[1]), x.dtype)
        rows = rows.at[slot].set(jnp.repeat(x, self.top_k, 0), mode="drop").reshape(num_experts, capacity, x.shape[1])
        results = jnp.einsum("ecf,efh->ech", self.activate(jnp.einsum("ech,ehf->ecf", rows, gate_up)), down)
        results = results.reshape(num_experts * capacity, x.shape[1]).at[slot].get(mode="fill", fill_value=0)
        results = results.astype(jnp.float32).reshape(num_tokens, self.top_k, x.shape[1])
        return (results * weights[..., None]).sum(1).astype(x.dtype)


PEERS = {
    "argosy": Argosy,
    "torch loop of Parameters": TorchLoop,
    "torch grouped_mm": TorchGroupedMm,
    "kt-kernel AMXBF16_SFT_MOE": KtKernelSft,
    "jax padded einsum": JaxPadded,
    "jax ragged_dot": JaxRaggedDot,
}

# Largest error by largest value, of outputs and of every kind of gradient: bf16 weights, rows and gradients, fp32 sums.
TOLERANCE = 2e-2
