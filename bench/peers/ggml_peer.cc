// ggml as the comparison calls it: the graph that llama.cpp builds for a SwiGLU MoE layer, on one
// thread, behind a C interface for ctypes.
//
// bf16 weights stay as they are; other types are quantised here and rearranged as llama.cpp does on loading, where ggml has
// such a layout for this CPU. Rows go in and out as fp32, which is what ggml computes on. One graph is kept for each number
// of tokens.
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

struct Shape {
  int64_t num_experts, top_k, hidden, intermediate;
};

struct ContextFree {
  void operator()(ggml_context* context) const { ggml_free(context); }
};
using Context = std::unique_ptr<ggml_context, ContextFree>;

Context make_context(size_t num_tensors, bool with_graph) {
  const size_t bytes =
      ggml_tensor_overhead() * num_tensors + (with_graph ? ggml_graph_overhead() : 0);
  return Context(ggml_init({bytes, nullptr, true}));
}

struct Weights {
  Context context;
  ggml_tensor* gate = nullptr;
  ggml_tensor* up = nullptr;
  ggml_tensor* down = nullptr;
  ggml_backend_buffer_t buffer = nullptr;
};

struct Graph {
  Context context;
  ggml_tensor* x = nullptr;
  ggml_tensor* experts = nullptr;
  ggml_tensor* weights = nullptr;
  ggml_tensor* out = nullptr;
  ggml_cgraph* graph = nullptr;
  ggml_gallocr_t allocator = nullptr;
};

struct Peer {
  Shape shape;
  ggml_backend_t backend = nullptr;
  Weights weights;
  std::map<int64_t, Graph> graphs;  // by number of tokens
};

bool make_graph(const Shape& shape, const Weights& w, int64_t num_tokens, Graph* made) {
  made->context = make_context(256, true);
  ggml_context* const c = made->context.get();
  if (c == nullptr) return false;
  made->x = ggml_new_tensor_2d(c, GGML_TYPE_F32, shape.hidden, num_tokens);
  made->experts = ggml_new_tensor_2d(c, GGML_TYPE_I32, shape.top_k, num_tokens);
  made->weights = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, shape.top_k, num_tokens);
  for (ggml_tensor* const input : {made->x, made->experts, made->weights}) ggml_set_input(input);
  ggml_tensor* const rows = ggml_reshape_3d(c, made->x, shape.hidden, 1, num_tokens);
  ggml_tensor* const gate = ggml_mul_mat_id(c, w.gate, rows, made->experts);
  ggml_tensor* const up = ggml_mul_mat_id(c, w.up, rows, made->experts);
  ggml_tensor* const act = ggml_swiglu_split(c, gate, up);
  ggml_tensor* const down = ggml_mul_mat_id(c, w.down, act, made->experts);
  ggml_tensor* const scaled = ggml_mul(c, down, made->weights);
  for (int64_t k = 0; k < shape.top_k; ++k) {
    ggml_tensor* const part = ggml_view_2d(c, scaled, shape.hidden, num_tokens, scaled->nb[2],
                                           static_cast<size_t>(k) * scaled->nb[1]);
    made->out = k == 0 ? part : ggml_add(c, made->out, part);
  }
  if (shape.top_k == 1) made->out = ggml_cont(c, made->out);
  ggml_set_output(made->out);
  made->graph = ggml_new_graph(c);
  ggml_build_forward_expand(made->graph, made->out);
  made->allocator = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
  return ggml_gallocr_alloc_graph(made->allocator, made->graph);
}

// Whether the CPU multiplies weights `w` by expert when they lie in a buffer of type `kind`.
bool takes(ggml_backend_dev_t device, ggml_backend_buffer_type_t kind, const Shape& shape,
           ggml_tensor* w) {
  const Context context = make_context(8, false);
  ggml_context* const c = context.get();
  ggml_tensor* const rows = ggml_new_tensor_3d(c, GGML_TYPE_F32, w->ne[0], 1, 4);
  ggml_tensor* const experts = ggml_new_tensor_2d(c, GGML_TYPE_I32, shape.top_k, 4);
  const ggml_tensor* const product = ggml_mul_mat_id(c, w, rows, experts);
  w->buffer = ggml_backend_buft_alloc_buffer(kind, 0);
  const bool taken = ggml_backend_dev_supports_op(device, product);
  ggml_backend_buffer_free(std::exchange(w->buffer, nullptr));
  return taken;
}

// The CPU's rearranging buffer type where it takes all three, else its ordinary one.
ggml_backend_buffer_type_t buffer_type_for(ggml_backend_t backend, const Shape& shape,
                                           const Weights& w) {
  const ggml_backend_dev_t device = ggml_backend_get_device(backend);
  const auto list =
      reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  for (auto kind = list != nullptr ? list(device) : nullptr; kind != nullptr && *kind != nullptr;
       ++kind) {
    if (takes(device, *kind, shape, w.gate) && takes(device, *kind, shape, w.down)) return *kind;
  }
  return ggml_backend_cpu_buffer_type();
}

void set_weights(ggml_tensor* w, const uint16_t* bits) {
  if (w->type == GGML_TYPE_BF16) return ggml_backend_tensor_set(w, bits, 0, ggml_nbytes(w));
  std::vector<float> values(static_cast<size_t>(ggml_nelements(w)));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t word = static_cast<uint32_t>(bits[i]) << 16;
    std::memcpy(&values[i], &word, sizeof(word));
  }
  std::vector<char> codes(ggml_nbytes(w));
  ggml_quantize_chunk(w->type, values.data(), codes.data(), 0, w->ne[1] * w->ne[2], w->ne[0],
                      nullptr);
  ggml_backend_tensor_set(w, codes.data(), 0, codes.size());
}

ggml_type type_of(const char* name) {
  for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
    const auto type = static_cast<ggml_type>(i);
    const char* const known = ggml_type_name(type);
    if (known != nullptr && std::strcmp(known, name) == 0) return type;
  }
  return GGML_TYPE_COUNT;
}

}  // namespace

extern "C" {

// shape: E, K, H, F; gate and up [E, F, H], down [E, H, F] in bf16; type: ggml's name of what they become. Null when
// ggml refuses.
void* ggml_peer_create(const int64_t* shape, const char* type_name, const uint16_t* gate,
                       const uint16_t* up, const uint16_t* down) {
  const ggml_type type = type_of(type_name);
  if (type == GGML_TYPE_COUNT) return nullptr;
  auto peer = std::make_unique<Peer>();
  peer->shape = {shape[0], shape[1], shape[2], shape[3]};
  const Shape& s = peer->shape;
  peer->backend = ggml_backend_cpu_init();
  if (peer->backend == nullptr) return nullptr;
  ggml_backend_cpu_set_n_threads(peer->backend, 1);
  Weights& w = peer->weights;
  w.context = make_context(8, false);
  ggml_context* const c = w.context.get();
  w.gate = ggml_new_tensor_3d(c, type, s.hidden, s.intermediate, s.num_experts);
  w.up = ggml_new_tensor_3d(c, type, s.hidden, s.intermediate, s.num_experts);
  w.down = ggml_new_tensor_3d(c, type, s.intermediate, s.hidden, s.num_experts);
  w.buffer = ggml_backend_alloc_ctx_tensors_from_buft(c, buffer_type_for(peer->backend, s, w));
  if (w.buffer == nullptr) return nullptr;
  ggml_backend_buffer_set_usage(w.buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  set_weights(w.gate, gate);
  set_weights(w.up, up);
  set_weights(w.down, down);
  return peer.release();
}

// 0, or not 0 when ggml refuses the batch.
int ggml_peer_forward(void* handle, int64_t num_tokens, const float* x, const int32_t* experts,
                      const float* weights, float* out) {
  Peer& peer = *static_cast<Peer*>(handle);
  auto found = peer.graphs.find(num_tokens);
  if (found == peer.graphs.end()) {
    Graph graph;
    if (!make_graph(peer.shape, peer.weights, num_tokens, &graph)) return 1;
    found = peer.graphs.emplace(num_tokens, std::move(graph)).first;
  }
  const Graph& graph = found->second;
  ggml_backend_tensor_set(graph.x, x, 0, ggml_nbytes(graph.x));
  ggml_backend_tensor_set(graph.experts, experts, 0, ggml_nbytes(graph.experts));
  ggml_backend_tensor_set(graph.weights, weights, 0, ggml_nbytes(graph.weights));
  if (ggml_backend_graph_compute(peer.backend, graph.graph) != GGML_STATUS_SUCCESS) return 2;
  ggml_backend_tensor_get(graph.out, out, 0, ggml_nbytes(graph.out));
  return 0;
}

}  // extern "C"
