// Checkpoints in Hugging Face format: safetensors files, sharded indexes, model configs, expert layouts.
//
// Nothing that a file says is believed before it is checked: no crash, no request for memory larger than the
// file plus a constant (contract 6.6, docs/fuzzing.md). Families: deepseek_v3, deepseek_v2, mixtral, qwen2_moe,
// qwen3_moe, olmoe, gpt_oss; per family the required fields, defaults and refused values stand in
// docs/checkpoints.md. Test: tests/io/.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/activation.h"
#include "argosy/quantise.h"
#include "argosy/router.h"
#include "argosy/router_file.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kUnset;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // byte range in the file
  int64_t end = 0;
};

// One open safetensors file. Thread-safe for reading after open().
class SafetensorsFile {
 public:
  // Checks the whole header: length, JSON, dtypes, shapes (products checked), ranges inside the file,
  // matching the shape, without overlap or hole. Errors: kNotFound, kIo, kCorruptData naming the tensor,
  // kUnsupported for a dtype that DType has not.
  static Result<std::shared_ptr<SafetensorsFile>> open(const std::string& path);
  ~SafetensorsFile();

  const std::string& path() const;
  // By rising name. A deque: 80 bytes of TensorInfo stand for 51 of the file, too many for one block.
  const std::deque<TensorInfo>& tensors() const;
  const TensorInfo* find(std::string_view name) const;

  // Reads one tensor. Errors of all four: kNotFound lists near names; kUnsupported for more than
  // kMaxTensorDims dimensions; kInvalidArgument for a range outside the tensor; kIo; kOutOfMemory.
  Result<Tensor> read(std::string_view name) const;
  // Reads rows [first, first + count) of the first dimension.
  Result<Tensor> read_rows(std::string_view name, int64_t first, int64_t count) const;
  // Reads consecutive elements, counted row-major from `first_element` on, as a tensor of shape `shape`.
  Result<Tensor> read_elements(std::string_view name, int64_t first_element,
                               std::span<const int64_t> shape) const;
  // The same into the caller's memory, as many as fill `out`: a multiple of the element's size.
  Status read_into(std::string_view name, int64_t first_element, std::span<std::byte> out) const;

  // Bytes of tensor data read so far through this object (the header does not count).
  int64_t bytes_read() const;

 private:
  struct State;
  explicit SafetensorsFile(std::unique_ptr<State> state);
  Result<const TensorInfo*> expect(std::string_view name) const;
  std::unique_ptr<State> state_;
};

struct NamedTensor {
  std::string name;
  ConstTensorView tensor;  // dense
};

// Writes a file that SafetensorsFile and the public library read: names sorted, data begins at a multiple
// of 64 bytes, every tensor at a multiple of its element size. Written beside the target and renamed over
// it; nothing is left behind on failure. Errors: kInvalidArgument (duplicate name, not dense), kIo.
Status write_safetensors(const std::string& path, std::span<const NamedTensor> tensors);

// "FILE:TENSOR" (the last colon splits). Errors as for read; kInvalidArgument when there is no colon.
Result<Tensor> read_tensor_argument(std::string_view file_and_tensor);

// A config's quantization_config: how quantised matrices lie on disk.
struct CheckpointQuantisation {
  // kE4M3Block128, kE4M3Row128, kMxfp8 or kMxfp4.
  BlockFormat format = BlockFormat::kUnset;
  // Modules that stay as they were, by one or more whole components of their names; '*' is any text.
  std::vector<std::string> modules_to_not_convert;

  // Whether the matrices of `module`, an expert's or a shared expert's, are quantised.
  bool converts(std::string_view module) const;
};

// What a config.json says of its MoE layers, every alias resolved.
struct ModelConfig {
  std::string family;  // the config's model_type, or the family that a router file names
  int64_t num_layers = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;         // width of one routed expert
  int64_t shared_intermediate = 0;  // width of all shared experts together; 0 = none
  bool shared_gate = false;         // the shared experts' row is scaled by sigmoid(x . gate)
  std::vector<bool> is_moe_layer;   // [num_layers]
  Activation activation;            // of routed and shared experts; validated
  bool gate_bias = false;           // the router's logits have a bias [E]
  bool expert_bias = false;         // every product of a routed expert has a bias
  RouterSpec router;                // validated
  std::optional<CheckpointQuantisation> quantisation;  // of routed and shared experts

  // Layers with experts, rising.
  std::vector<int64_t> moe_layers() const;
};

// Reads DIR/config.json or the text itself. Errors: kNotFound; kCorruptData for JSON that does not parse or
// passes a limit of docs/checkpoints.md; kInvalidArgument naming family, field and value for missing, contradictory or refused fields;
// kUnsupported for an unknown family, listing the known ones, and for what is valid but not built yet
// (another quantisation, another activation, biases of a family that has none).
//
// With `router` its spec replaces the router rule of the config, whose fields for it are then not read; the
// numbers of experts must agree, and sizes of 0 are taken from the config. Its family, if any, stands in for
// model_type.
Result<ModelConfig> read_model_config(const std::string& dir, const RouterFile* router = nullptr);
Result<ModelConfig> parse_model_config(std::string_view json_text,
                                       const RouterFile* router = nullptr);

// Expert matrices as the GEMM wants them: rows are outputs. bf16 or fp32, or all three quantised.
struct ExpertTensors {
  Tensor gate;  // [F, H]
  Tensor up;    // [F, H]
  Tensor down;  // [H, F]
  // Shapes as above; the three tensors above are then empty. Codes and scales as the file has them.
  struct Quantised {
    QuantisedTensor gate, up, down;
  };
  std::optional<Quantised> quantised;
  // bf16 or fp32; all three or, without ModelConfig::expert_bias, none.
  Tensor gate_bias;  // [F]
  Tensor up_bias;    // [F]
  Tensor down_bias;  // [H]
};

// What every rank holds of one MoE layer.
struct SharedTensors {
  Tensor gate;            // router, [E, H]
  Tensor gate_bias;       // [E] or empty
  Tensor selection_bias;  // fp32 [E] or empty
  std::optional<ExpertTensors>
      shared;          // the shared experts as one MLP of width shared_intermediate
  Tensor shared_gate;  // [1, H] or empty
};

// Gradients of one MoE layer as the engine has them: fp32, dense, all E experts. A view without dtype is left out.
struct LayerGradients {
  ConstTensorView gate, gate_bias;                   // [E, H], [E]
  ConstTensorView expert_gate, expert_up;            // [E, F, H]
  ConstTensorView expert_down;                       // [E, H, F]
  ConstTensorView expert_gate_bias, expert_up_bias;  // [E, F]
  ConstTensorView expert_down_bias;                  // [E, H]
  ConstTensorView shared_gate, shared_up;            // [Fs, H]
  ConstTensorView shared_down;                       // [H, Fs]
  ConstTensorView shared_scale;                      // [1, H]
};

struct OwnedTensor {
  std::string name;
  Tensor tensor;
};

struct CheckpointOptions {
  // Do not read an index: use every tensor of every *.safetensors file whose name begins with "model".
  // For folders whose index is stale. Nothing is written.
  bool rebuild_index = false;
  // Replaces the router rule of the config (read_model_config). A selection bias is read when its spec has one.
  std::optional<RouterFile> router = std::nullopt;
  // kBF16 or kF32: experts that are quantised on disk come out as matrices of this dtype (one fp32 product, for
  // bf16 rounded once), for what cannot run them quantised. kUnset: as they are.
  DType dequantise_to = DType::kUnset;
  // A NaN among an expert's scales (e8m0 code 255): kept, or kNonFinite.
  OnNonFinite on_nan_scale = OnNonFinite::kNaN;
};

// A checkpoint folder: config.json and, where there is one, model.safetensors.index.json with its shards,
// else model.safetensors. Only indexed files are opened. Copies share the open files. Thread-safe.
class Checkpoint {
 public:
  // Errors: those of read_model_config and SafetensorsFile::open; kNotFound lists every missing shard;
  // kCorruptData for an index that names tensors its shards do not hold; kInvalidArgument when the config's list
  // of MoE layers and the tensors contradict each other, or for another dtype to dequantise to.
  static Result<Checkpoint> open(const std::string& dir, const CheckpointOptions& options = {});

  const std::string& dir() const;
  const ModelConfig& config() const;

  // Errors of both: kInvalidArgument for a layer out of range or without experts (lists those that have),
  // for a wrong shape or dtype (seen and expected), for two layouts at once, and for a tensor of the MoE
  // block that the family does not have; kUnsupported for F16; kNotFound naming the tensor. Of quantised experts
  // also: kCorruptData for a negative or infinite scale, kNonFinite (CheckpointOptions::on_nan_scale).
  Result<SharedTensors> read_shared(int64_t layer) const;
  // Expert `expert` alone: from per-expert tensors, or its slice of fused ones (docs/checkpoints.md: gate rows
  // first, or for gpt_oss transposed with gate and up interleaved). Reads only that expert's bytes and scales.
  Result<ExpertTensors> read_expert(int64_t layer, int64_t expert) const;

  // The gradients as the checkpoint's own tensors, in its layout: "d." and the tensor's name, fp32. Errors: those of
  // read_shared for the layer; kInvalidArgument for a shape that is not the layer's; kOutOfMemory.
  Result<std::vector<OwnedTensor>> gradient_tensors(int64_t layer,
                                                    const LayerGradients& gradients) const;

  // Bytes of tensor data read so far from all files.
  int64_t bytes_read() const;

 private:
  struct State;
  explicit Checkpoint(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace argosy
