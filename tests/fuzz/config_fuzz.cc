// parse_model_config: whatever the text, a config that keeps its own rules or a typed refusal.
//
// Guards src/io/config.cc, config_fields.cc and json.cc.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>

#include "argosy/checkpoint.h"
#include "fuzz/fuzz_target.h"
#include "fuzz/json_mutator.h"
#include "fuzz/large_json.h"
#include "io/json.h"

namespace argosy::testing {
namespace {

// A list's values are 16 bytes each for 2 of text, in a vector that doubles; the tree is freed
// through one as well.
constexpr HeapBound kBound = {
    .peak = 32, .constant = 512 << 10, .small_largest = 16, .small_constant = 8192};

constexpr std::string_view kWords[] = {"model_type",
                                       "text_config",
                                       "deepseek_v2",
                                       "deepseek_v3",
                                       "mixtral",
                                       "qwen2_moe",
                                       "qwen3_moe",
                                       "olmoe",
                                       "gpt_oss",
                                       "num_hidden_layers",
                                       "hidden_size",
                                       "hidden_act",
                                       "silu",
                                       "num_experts",
                                       "num_local_experts",
                                       "n_routed_experts",
                                       "num_experts_per_tok",
                                       "experts_per_token",
                                       "intermediate_size",
                                       "moe_intermediate_size",
                                       "shared_expert_intermediate_size",
                                       "n_shared_experts",
                                       "n_group",
                                       "topk_group",
                                       "topk_method",
                                       "greedy",
                                       "group_limited_greedy",
                                       "norm_topk_prob",
                                       "routed_scaling_factor",
                                       "scoring_func",
                                       "softmax",
                                       "sigmoid",
                                       "first_k_dense_replace",
                                       "moe_layer_freq",
                                       "decoder_sparse_step",
                                       "mlp_only_layers",
                                       "mlp_bias",
                                       "swiglu_limit",
                                       "swiglu_alpha",
                                       "quantization_config"};

std::string check_config(const ModelConfig& config) {
  const auto layers = static_cast<size_t>(config.num_layers);
  if (config.num_layers < 1 || config.num_layers > 65536 || config.is_moe_layer.size() != layers) {
    return fmt::format("{} layers, {} marked", config.num_layers, config.is_moe_layer.size());
  }
  const std::vector<int64_t> moe = config.moe_layers();
  const auto marked = std::count(config.is_moe_layer.begin(), config.is_moe_layer.end(), true);
  if (static_cast<std::ptrdiff_t>(moe.size()) != marked) return "moe_layers() is not is_moe_layer";
  if (config.hidden < 1) return fmt::format("hidden is {}", config.hidden);
  if (config.router.num_experts == 0) return moe.empty() ? "" : "a dense model with MoE layers";
  if (config.intermediate < 1 || config.shared_intermediate < 0) {
    return fmt::format("widths {} and {}", config.intermediate, config.shared_intermediate);
  }
  if (config.shared_gate && config.shared_intermediate == 0) return "a gate of no shared expert";
  if (!validate(config.activation).ok()) return "an accepted activation is not valid";
  const Status router = validate(config.router);
  return router.ok() ? "" : "an accepted router is not valid: " + router.to_string();
}

std::string check(std::string_view input) {
  std::optional<Result<ModelConfig>> config;
  const std::string problem = within(kBound, input.size(), [&] {
    config = parse_model_config(input);
    return std::string();
  });
  if (!problem.empty()) return problem;
  // Not watched: moe_layers() is 8 bytes a layer, and the number of layers is a number in the text.
  if (*config) return check_config(**config);
  return refusal_problem(config->error(), {StatusCode::kCorruptData, StatusCode::kInvalidArgument,
                                           StatusCode::kUnsupported});
}

std::string mutate(std::string_view input, Random& random, ByteMutator bytes) {
  return mutate_json(input, kWords, random, bytes);
}

std::map<std::string, std::string> seeds() {
  std::map<std::string, std::string> files;
  for (const char* family :
       {"deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}) {
    std::ifstream file(fmt::format("{}/models/{}_tiny/config.json", ARGOSY_TESTDATA, family));
    std::string text(std::istreambuf_iterator<char>(file), {});
    if (std::string_view(family) == "qwen3_moe") {
      files.emplace("nested", fmt::format(R"({{"model_type":"wrapper","text_config":{}}})", text));
    }
    files.emplace(family, std::move(text));
  }
  const std::string start = R"({"model_type":"qwen3_moe","num_hidden_layers":4,"hidden_size":8,)"
                            R"("num_experts":4,"moe_intermediate_size":4,"num_experts_per_tok":2,)"
                            R"("norm_topk_prob":true,)";
  files.emplace("sparse_step", start + R"("decoder_sparse_step":2,"mlp_only_layers":[3]})");
  files.emplace("most_layers",
                R"({"model_type":"mixtral","num_hidden_layers":65536,"hidden_size":8,)"
                R"("num_experts":4,"intermediate_size":4,"num_experts_per_tok":2})");
  files.emplace("type_alone", R"({"model_type":"gpt_oss"})");
  files.emplace("key_twice", start + R"("hidden_size":8})");
  files.emplace("not_a_number", start + R"("routed_scaling_factor":1e999})");
  files.emplace("deep", std::string(70, '[') + std::string(70, ']'));
  files.emplace("alias_differs", start + R"("num_local_experts":8})");
  return files;
}

std::map<std::string, std::string> large() {
  std::map<std::string, std::string> texts;
  const std::string start = R"({"model_type":"mixtral","num_hidden_layers":2,"hidden_size":8,)"
                            R"("num_experts":4,"intermediate_size":4,"num_experts_per_tok":2)";
  for (const auto& [name, text] : large_json()) {
    texts.emplace(name, text);
    texts.emplace("member_" + name, start + ",\"odd\":" + text + "}");
    texts.emplace("nested_" + name, "{\"text_config\":" + start + ",\"odd\":" + text + "}}");
  }
  // As many values as are accepted, in one list; and as members, of which the one that is freed first
  // makes the stack grow on which they are freed.
  const std::string list = "[" + repeated("1", ",").substr(0, 2 * io::kMaxJsonValues - 17) + "]";
  texts.emplace("most_values_in_a_list", start + ",\"odd\":" + list + "}");
  const std::string members = one_letter_members(io::kMaxJsonValues - 20, "1");
  texts.emplace("most_values_as_members", start + "," + members.substr(1, members.size() - 2) +
                                              ",\"" + one_letter(500'000) + "\":[1,1,1]}");
  texts.emplace("giant_family", "{\"model_type\":\"" + repeated("x") + "\"}");
  texts.emplace("giant_word", start + ",\"hidden_act\":\"" + repeated("\\n") + "\"}");
  return texts;
}

}  // namespace

const FuzzTarget& config_target() {
  static const FuzzTarget target = {"config", check, mutate, seeds, large};
  return target;
}

}  // namespace argosy::testing
