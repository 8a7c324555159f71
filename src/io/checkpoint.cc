// Checkpoint: from a layer and an expert to matrices, through the tables of families.h and the
// layouts found at open. A tensor's shape and dtype are compared with the config before a byte of
// it is read, so what was not asked for is never read. Test: tests/io/checkpoint_test.cc.
#include "argosy/checkpoint.h"

#include <fmt/ranges.h>

#include <utility>

#include "argosy/bfloat16.h"
#include "base/error.h"
#include "io/expected_tensor.h"
#include "io/families.h"
#include "io/gradient_layout.h"
#include "io/json.h"
#include "io/layer_layout.h"
#include "io/quantised_matrix.h"
#include "io/tensor_directory.h"
#include "io/transpose.h"

namespace argosy {

struct Checkpoint::State {
  std::string dir;
  ModelConfig config;
  const io::Family* family = nullptr;
  io::TensorDirectory tensors;
  std::vector<io::LayerLayout> layouts;  // by layer
  DType dequantise_to = DType::kUnset;
  OnNonFinite on_nan_scale = OnNonFinite::kNaN;

  Result<const io::LayerLayout*> layout_of(int64_t layer) const;
  io::QuantisedRules rules() const {
    return {config.quantisation.has_value() ? &*config.quantisation : nullptr, on_nan_scale,
            dequantise_to};
  }
  // Matrices that are tensors of their own, quantised or not.
  Result<ExpertTensors> read_mlp(const std::string& prefix, const io::MatrixNames& names,
                                 int64_t width) const;
  Result<ExpertTensors> read_matrices(const io::LayerLayout& layout, int64_t expert) const;
};

namespace {

using Entry = io::TensorDirectory::Entry;
using Shape = std::vector<int64_t>;

Result<Tensor> read_whole(const io::TensorDirectory& tensors, const std::string& name,
                          const Shape& shape) {
  ARGOSY_ASSIGN_OR_RETURN(const Entry* entry, io::expect_float(tensors, name, shape));
  return entry->file->read(name);
}

// Some published bf16 conversions round the bias as well; it is widened, which is exact.
Result<Tensor> read_as_f32(const io::TensorDirectory& tensors, const std::string& name,
                           int64_t length) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor stored, read_whole(tensors, name, {length}));
  if (stored.view().dtype == DType::kF32) return stored;
  ARGOSY_ASSIGN_OR_RETURN(Tensor wide, Tensor::zeros(DType::kF32, {length}));
  const BFloat16* from = std::as_const(stored).view().as<BFloat16>();
  float* to = wide.view().as<float>();
  for (int64_t i = 0; i < length; ++i) to[i] = from[i].to_float();
  return wide;
}

// One matrix inside a tensor of the file.
struct MatrixPlace {
  std::string tensor;
  Shape tensor_shape;
  int64_t first_element = 0;
  Shape shape;
};

struct ExpertPlaces {
  MatrixPlace gate, up, down;
};

Result<ExpertTensors> read_places(const io::TensorDirectory& tensors, const ExpertPlaces& places) {
  const Entry* entries[3];
  const MatrixPlace* wanted[3] = {&places.gate, &places.up, &places.down};
  for (int i = 0; i < 3; ++i) {
    ARGOSY_ASSIGN_OR_RETURN(entries[i],
                            io::expect_float(tensors, wanted[i]->tensor, wanted[i]->tensor_shape));
    if (entries[i]->info->dtype != entries[0]->info->dtype) {
      return io::two_dtypes(*entries[i], *entries[0]);
    }
  }
  ExpertTensors expert;
  Tensor* out[3] = {&expert.gate, &expert.up, &expert.down};
  for (int i = 0; i < 3; ++i) {
    ARGOSY_ASSIGN_OR_RETURN(
        *out[i], entries[i]->file->read_elements(wanted[i]->tensor, wanted[i]->first_element,
                                                 wanted[i]->shape));
  }
  return expert;
}

// Matrices that are tensors of their own, named `prefix` + matrix + ".weight".
ExpertPlaces separate_places(const std::string& prefix, const io::MatrixNames& names, int64_t width,
                             int64_t hidden) {
  const auto place = [&](std::string_view matrix, const Shape& shape) {
    return MatrixPlace{fmt::format("{}{}.weight", prefix, matrix), shape, 0, shape};
  };
  return {place(names.gate, {width, hidden}), place(names.up, {width, hidden}),
          place(names.down, {hidden, width})};
}

ExpertPlaces fused_places(const std::string& block, int64_t expert, const ModelConfig& config) {
  const int64_t num_experts = config.router.num_experts;
  const int64_t width = config.intermediate;
  const int64_t hidden = config.hidden;
  // Shapes are compared with the file before the offsets are used, so these products fit wherever
  // they matter; unsigned arithmetic keeps the others defined.
  const auto product = [](int64_t a, int64_t b, int64_t c) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b) *
                                static_cast<uint64_t>(c));
  };
  const Shape gate_up = {num_experts, 2 * width, hidden};
  const std::string gate_up_name = block + "experts.gate_up_proj";
  return {{gate_up_name, gate_up, product(2 * expert, width, hidden), {width, hidden}},
          {gate_up_name, gate_up, product(2 * expert + 1, width, hidden), {width, hidden}},
          {block + "experts.down_proj",
           {num_experts, hidden, width},
           product(expert, width, hidden),
           {hidden, width}}};
}

// Entry `expert` of a tensor of all experts, as a matrix. Precondition: the shape is the file's.
Result<Tensor> read_entry(const Entry& entry, int64_t expert, int64_t rows, int64_t columns) {
  const Shape shape = {rows, columns};
  return entry.file->read_elements(entry.name(), expert * rows * columns, shape);
}

// FusedLayout::kInterleavedTransposed, without biases.
Result<ExpertTensors> read_interleaved(const io::TensorDirectory& tensors, const std::string& block,
                                       int64_t expert, const ModelConfig& config) {
  const int64_t num_experts = config.router.num_experts;
  const int64_t width = config.intermediate;
  const int64_t hidden = config.hidden;
  const auto find = [&](std::string_view name, const Shape& shape) {
    return io::expect_float(tensors, fmt::format("{}experts.{}", block, name), shape);
  };
  ARGOSY_ASSIGN_OR_RETURN(const Entry* gate_up,
                          find("gate_up_proj", {num_experts, hidden, 2 * width}));
  ARGOSY_ASSIGN_OR_RETURN(const Entry* down, find("down_proj", {num_experts, width, hidden}));
  if (down->info->dtype != gate_up->info->dtype) return io::two_dtypes(*down, *gate_up);

  ExpertTensors result;
  {
    ARGOSY_ASSIGN_OR_RETURN(const Tensor both, read_entry(*gate_up, expert, hidden, 2 * width));
    const Shape shape = {width, hidden};
    ARGOSY_ASSIGN_OR_RETURN(result.gate, io::transposed_columns(both.view(), 0, 2, shape));
    ARGOSY_ASSIGN_OR_RETURN(result.up, io::transposed_columns(both.view(), 1, 2, shape));
  }
  ARGOSY_ASSIGN_OR_RETURN(const Tensor rows, read_entry(*down, expert, width, hidden));
  const Shape down_shape = {hidden, width};
  ARGOSY_ASSIGN_OR_RETURN(result.down, io::transposed_columns(rows.view(), 0, 1, down_shape));
  return result;
}

// Biases of all experts, those of gate and up by turns.
Status read_biases(const io::TensorDirectory& tensors, const std::string& block, int64_t expert,
                   const ModelConfig& config, ExpertTensors* result) {
  const int64_t num_experts = config.router.num_experts;
  const int64_t width = config.intermediate;
  const int64_t hidden = config.hidden;
  const auto find = [&](std::string_view name, const Shape& shape) {
    return io::expect_float(tensors, fmt::format("{}experts.{}", block, name), shape);
  };
  ARGOSY_ASSIGN_OR_RETURN(const Entry* gate_up_bias,
                          find("gate_up_proj_bias", {num_experts, 2 * width}));
  ARGOSY_ASSIGN_OR_RETURN(const Entry* down_bias, find("down_proj_bias", {num_experts, hidden}));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor biases, read_entry(*gate_up_bias, expert, 1, 2 * width));
  const Shape bias_shape = {width};
  ARGOSY_ASSIGN_OR_RETURN(result->gate_bias,
                          io::transposed_columns(biases.view(), 0, 2, bias_shape));
  ARGOSY_ASSIGN_OR_RETURN(result->up_bias, io::transposed_columns(biases.view(), 1, 2, bias_shape));
  const Shape hidden_shape = {hidden};
  ARGOSY_ASSIGN_OR_RETURN(result->down_bias, down_bias->file->read_elements(
                                                 down_bias->name(), expert * hidden, hidden_shape));
  return {};
}

}  // namespace

Checkpoint::Checkpoint(std::shared_ptr<State> state) : state_(std::move(state)) {}

Result<Checkpoint> Checkpoint::open(const std::string& dir, const CheckpointOptions& options) {
  const DType dtype = options.dequantise_to;
  if (dtype != DType::kUnset && dtype != DType::kBF16 && dtype != DType::kF32) {
    return base::invalid("dequantise_to is {}, expected BF16, F32 or kUnset", name_of(dtype));
  }
  const RouterFile* router = options.router.has_value() ? &*options.router : nullptr;
  ARGOSY_ASSIGN_OR_RETURN(ModelConfig config, read_model_config(dir, router));
  ARGOSY_ASSIGN_OR_RETURN(io::TensorDirectory tensors, io::TensorDirectory::open(dir, options));
  const io::Family* family = io::find_family(config.family);
  Result<std::vector<io::LayerLayout>> layouts = io::find_layer_layouts(tensors, config, *family);
  if (!layouts) {
    return Status(layouts.error().code(), fmt::format("{}: {}", dir, layouts.error().message()));
  }
  return Checkpoint(
      std::make_shared<State>(State{dir, std::move(config), family, std::move(tensors),
                                    std::move(*layouts), dtype, options.on_nan_scale}));
}

const std::string& Checkpoint::dir() const { return state_->dir; }
const ModelConfig& Checkpoint::config() const { return state_->config; }
int64_t Checkpoint::bytes_read() const { return state_->tensors.bytes_read(); }

Result<const io::LayerLayout*> Checkpoint::State::layout_of(int64_t layer) const {
  const bool in_range = layer >= 0 && layer < config.num_layers;
  if (!in_range || !config.is_moe_layer[static_cast<size_t>(layer)]) {
    return base::invalid(
        "{}: layer {} {}; layers with experts: [{}]", dir, layer,
        in_range ? "has no experts" : fmt::format("is not in 0 to {}", config.num_layers - 1),
        fmt::join(config.moe_layers(), ", "));
  }
  const io::LayerLayout& layout = layouts[static_cast<size_t>(layer)];
  if (!layout.problem.ok()) {
    return Status(layout.problem.code(), fmt::format("{}: {}", dir, layout.problem.message()));
  }
  return &layout;
}

Result<ExpertTensors> Checkpoint::State::read_mlp(const std::string& prefix,
                                                  const io::MatrixNames& names,
                                                  int64_t width) const {
  ARGOSY_ASSIGN_OR_RETURN(const bool quantised, io::converts_mlp(rules(), prefix, names));
  if (quantised) {
    return io::read_quantised_mlp(tensors, rules(), prefix, names, width, config.hidden);
  }
  ARGOSY_RETURN_IF_ERROR(io::expect_no_scales(tensors, prefix, names));
  return read_places(tensors, separate_places(prefix, names, width, config.hidden));
}

Result<ExpertTensors> Checkpoint::State::read_matrices(const io::LayerLayout& layout,
                                                       int64_t expert) const {
  const std::string& block = layout.block;
  if (layout.experts == io::ExpertLayout::kSeparate) {
    return read_mlp(fmt::format("{}experts.{}.", block, expert), family->expert,
                    config.intermediate);
  }
  const bool quantised = rules().converts(block + "experts");
  const bool packed = layout.experts == io::ExpertLayout::kPacked;
  if (packed != quantised) {
    return base::invalid("the experts of {} lie in {} but by config.json they are {}",
                         io::in_quotes(block), packed ? "blocks and scales" : "fused matrices",
                         quantised ? "quantised" : "not quantised");
  }
  if (packed) return io::read_packed_expert(tensors, rules(), block, expert, config);
  if (family->fused_layout == io::FusedLayout::kInterleavedTransposed) {
    return read_interleaved(tensors, block, expert, config);
  }
  return read_places(tensors, fused_places(block, expert, config));
}

Result<SharedTensors> Checkpoint::read_shared(int64_t layer) const {
  ARGOSY_ASSIGN_OR_RETURN(const io::LayerLayout* layout, state_->layout_of(layer));
  const ModelConfig& config = state_->config;
  const io::TensorDirectory& tensors = state_->tensors;
  const int64_t num_experts = config.router.num_experts;
  SharedTensors shared;
  const std::string router = layout->block + std::string(state_->family->router_module);
  ARGOSY_ASSIGN_OR_RETURN(shared.gate,
                          read_whole(tensors, router + ".weight", {num_experts, config.hidden}));
  if (config.gate_bias) {
    ARGOSY_ASSIGN_OR_RETURN(shared.gate_bias, read_whole(tensors, router + ".bias", {num_experts}));
  }
  if (config.router.selection_bias == Choice::kYes) {
    ARGOSY_ASSIGN_OR_RETURN(shared.selection_bias,
                            read_as_f32(tensors, router + ".e_score_correction_bias", num_experts));
  }
  if (config.shared_intermediate > 0) {
    const std::string prefix = fmt::format("{}{}.", layout->block, state_->family->shared_module);
    ARGOSY_ASSIGN_OR_RETURN(shared.shared,
                            state_->read_mlp(prefix, io::kProjections, config.shared_intermediate));
  }
  if (config.shared_gate) {
    ARGOSY_ASSIGN_OR_RETURN(
        shared.shared_gate,
        read_whole(tensors, layout->block + "shared_expert_gate.weight", {1, config.hidden}));
  }
  return shared;
}

Result<ExpertTensors> Checkpoint::read_expert(int64_t layer, int64_t expert) const {
  ARGOSY_ASSIGN_OR_RETURN(const io::LayerLayout* layout, state_->layout_of(layer));
  const ModelConfig& config = state_->config;
  if (expert < 0 || expert >= config.router.num_experts) {
    return base::invalid("{}: expert {} is not in 0 to {}", state_->dir, expert,
                         config.router.num_experts - 1);
  }
  ARGOSY_ASSIGN_OR_RETURN(ExpertTensors result, state_->read_matrices(*layout, expert));
  if (config.expert_bias) {
    ARGOSY_RETURN_IF_ERROR(read_biases(state_->tensors, layout->block, expert, config, &result));
  }
  return result;
}

Result<std::vector<OwnedTensor>> Checkpoint::gradient_tensors(
    int64_t layer, const LayerGradients& gradients) const {
  ARGOSY_ASSIGN_OR_RETURN(const io::LayerLayout* layout, state_->layout_of(layer));
  return io::gradient_tensors(state_->config, *state_->family, *layout, gradients);
}

}  // namespace argosy
