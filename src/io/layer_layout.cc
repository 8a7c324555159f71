// Classifies every tensor below the MoE module of every layer. Test: tests/io/checkpoint_test.cc.
#include "io/layer_layout.h"

#include <array>
#include <charconv>

#include "base/error.h"
#include "io/json.h"
#include "io/quantised_matrix.h"

namespace argosy::io {
namespace {

using Entry = TensorDirectory::Entry;

// What may stand before "layers.".
constexpr std::array<std::string_view, 3> kPrefixes = {"model.", "", "model.language_model."};

Result<std::string> find_prefix(const TensorDirectory& directory) {
  const Entry* example = nullptr;
  std::string found(kPrefixes[0]);
  for (const std::string_view prefix : kPrefixes) {
    const auto entries = directory.with_prefix(fmt::format("{}layers.", prefix));
    if (entries.empty()) continue;
    if (example != nullptr) {
      return base::invalid("two sets of layers: tensors {} and {}", in_quotes(example->name()),
                           in_quotes(entries.front().name()));
    }
    example = &entries.front();
    found = prefix;
  }
  return found;
}

// What a tensor of an MoE block is for.
enum class Role {
  kUnknown,
  kRouter,
  kShared,
  kExpert,
  kFusedExperts,
  kPackedExperts,
  kExpertBias,
  kExpertOutOfRange
};

bool is_matrix_of(std::string_view name, const MatrixNames& names, bool quantised) {
  for (const std::string_view matrix : {names.gate, names.up, names.down}) {
    if (!name.starts_with(matrix)) continue;
    const std::string_view suffix = name.substr(matrix.size());
    if (suffix == ".weight") return true;
    if (quantised && (suffix == kScaleSuffixes[0] || suffix == kScaleSuffixes[1])) return true;
  }
  return false;
}

bool is_packed(std::string_view name, const Family& family, const ModelConfig& config) {
  if (!config.quantisation.has_value() || config.quantisation->format != BlockFormat::kMxfp4) {
    return false;
  }
  return family.fused_layout == FusedLayout::kInterleavedTransposed &&
         (name == "gate_up_proj_blocks" || name == "gate_up_proj_scales" ||
          name == "down_proj_blocks" || name == "down_proj_scales");
}

// `name` is what follows "experts.".
Role expert_role(std::string_view name, const Family& family, const ModelConfig& config) {
  if (name == "gate_up_proj" || name == "down_proj") return Role::kFusedExperts;
  if (is_packed(name, family, config)) return Role::kPackedExperts;
  if (family.biases && (name == "gate_up_proj_bias" || name == "down_proj_bias")) {
    return Role::kExpertBias;
  }
  int64_t expert = 0;
  const auto [after, failure] = std::from_chars(name.data(), name.data() + name.size(), expert);
  const auto num_digits = static_cast<size_t>(after - name.data());
  const bool is_plain =
      failure == std::errc() && name[0] != '-' && (name[0] != '0' || num_digits == 1);
  if (!is_plain || num_digits == name.size() || name[num_digits] != '.') return Role::kUnknown;
  if (!is_matrix_of(name.substr(num_digits + 1), family.expert, config.quantisation.has_value())) {
    return Role::kUnknown;
  }
  return expert < config.router.num_experts ? Role::kExpert : Role::kExpertOutOfRange;
}

bool is_router(std::string_view name, const Family& family, const ModelConfig& config) {
  if (!name.starts_with(family.router_module)) return false;
  name.remove_prefix(family.router_module.size());
  return name == ".weight" || (name == ".bias" && config.gate_bias) ||
         (name == ".e_score_correction_bias" && family.selection_bias);
}

bool is_shared(std::string_view name, const Family& family, const ModelConfig& config) {
  if (config.shared_intermediate == 0) return false;
  if (config.shared_gate && name == "shared_expert_gate.weight") return true;
  if (!name.starts_with(family.shared_module)) return false;
  name.remove_prefix(family.shared_module.size());
  return name.starts_with(".") &&
         is_matrix_of(name.substr(1), kProjections, config.quantisation.has_value());
}

// `name` is what follows the block's prefix.
Role role_of(std::string_view name, const Family& family, const ModelConfig& config) {
  constexpr std::string_view kExperts = "experts.";
  if (is_router(name, family, config)) return Role::kRouter;
  if (name.starts_with(kExperts)) {
    return expert_role(name.substr(kExperts.size()), family, config);
  }
  return is_shared(name, family, config) ? Role::kShared : Role::kUnknown;
}

Status two_layouts(const Entry& a, const Entry& b) {
  return base::invalid("two layouts of one layer's experts at once: {} and {}", in_quotes(a.name()),
                       in_quotes(b.name()));
}

// Both modules a family may use; one and the same for most.
std::vector<std::string_view> modules_of(const Family& family) {
  if (family.module == kFusedModule) return {family.module};
  return {family.module, kFusedModule};
}

std::string block_prefix(const std::string& prefix, int64_t layer, std::string_view module) {
  return fmt::format("{}layers.{}.{}.", prefix, layer, module);
}

// Status of a layer that the config calls dense.
Status check_dense(const TensorDirectory& directory, const Family& family,
                   const std::string& prefix, int64_t layer) {
  for (const std::string_view module : modules_of(family)) {
    const std::string block = block_prefix(prefix, layer, module);
    for (const std::string& part :
         {std::string("experts."), std::string(family.router_module) + ".weight"}) {
      const auto entries = directory.with_prefix(block + part);
      if (entries.empty()) continue;
      return base::invalid("layer {} is dense by config.json but the checkpoint holds {}", layer,
                           in_quotes(entries.front().name()));
    }
  }
  return {};
}

class LayerScan {
 public:
  LayerScan(const Family& family, const ModelConfig& config) : family_(family), config_(config) {}

  // Takes one tensor below `block` into account.
  Status add(const Entry& entry, const std::string& block) {
    if (first_ == nullptr) {
      first_ = &entry;
      layout_.block = block;
    }
    if (layout_.block != block) return two_layouts(*first_, entry);
    const Role role =
        role_of(std::string_view(entry.name()).substr(block.size()), family_, config_);
    if (role == Role::kExpertOutOfRange) {
      return base::invalid("tensor {} of an expert; config.json says there are {} experts",
                           in_quotes(entry.name()), config_.router.num_experts);
    }
    if (role == Role::kUnknown) {
      return base::invalid("tensor {} of an MoE block is none that {} has by its config.json",
                           in_quotes(entry.name()), family_.name);
    }
    switch (role) {
      case Role::kExpert:
        return add_expert(entry, ExpertLayout::kSeparate);
      case Role::kFusedExperts:
        return add_expert(entry, ExpertLayout::kFused);
      case Role::kPackedExperts:
        return add_expert(entry, ExpertLayout::kPacked);
      default:
        return {};
    }
  }

  bool found_experts() const { return expert_ != nullptr; }
  LayerLayout& layout() { return layout_; }

 private:
  Status add_expert(const Entry& entry, ExpertLayout experts) {
    if (expert_ != nullptr && layout_.experts != experts) return two_layouts(*expert_, entry);
    expert_ = &entry;
    layout_.experts = experts;
    return {};
  }

  const Family& family_;
  const ModelConfig& config_;
  LayerLayout layout_;
  const Entry* first_ = nullptr;
  const Entry* expert_ = nullptr;
};

LayerLayout scan_layer(const TensorDirectory& directory, const ModelConfig& config,
                       const Family& family, const std::string& prefix, int64_t layer) {
  LayerScan scan(family, config);
  LayerLayout& layout = scan.layout();
  for (const std::string_view module : modules_of(family)) {
    const std::string block = block_prefix(prefix, layer, module);
    for (const Entry& entry : directory.with_prefix(block)) {
      layout.problem = scan.add(entry, block);
      if (!layout.problem.ok()) return std::move(layout);
    }
  }
  if (!scan.found_experts()) {
    layout.problem =
        base::error(StatusCode::kNotFound,
                    "layer {} has no experts in the checkpoint: neither {}experts.0.{}.weight nor "
                    "{}experts.gate_up_proj",
                    layer, block_prefix(prefix, layer, family.module), family.expert.gate,
                    block_prefix(prefix, layer, kFusedModule));
  }
  return std::move(layout);
}

}  // namespace

Result<std::vector<LayerLayout>> find_layer_layouts(const TensorDirectory& directory,
                                                    const ModelConfig& config,
                                                    const Family& family) {
  ARGOSY_ASSIGN_OR_RETURN(const std::string prefix, find_prefix(directory));
  std::vector<LayerLayout> layouts(static_cast<size_t>(config.num_layers));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    if (config.is_moe_layer[at]) {
      layouts[at] = scan_layer(directory, config, family, prefix, layer);
    } else {
      ARGOSY_RETURN_IF_ERROR(check_dense(directory, family, prefix, layer));
    }
  }
  return layouts;
}

}  // namespace argosy::io
