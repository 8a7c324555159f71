// parse_router_file: a router file. What is accepted prints and reads back, field by field.
//
// Guards src/io/router_file.cc and src/router/spec_fields.cc.
#include "argosy/router_file.h"
#include "fuzz/fuzz_target.h"
#include "fuzz/json_mutator.h"
#include "fuzz/large_json.h"

namespace argosy::testing {
namespace {

// A tree of at most 16,384 values, as of a config.
constexpr HeapBound kBound = {
    .peak = 32, .constant = 512 << 10, .small_largest = 16, .small_constant = 8192};

// "unset" is printed, but nothing that a file may say.
std::string check_fields(const RouterSpec& spec) {
  RouterSpec read;
  std::string rest = to_string(spec);
  for (const std::string& field : router_field_names()) {
    const size_t end = rest.find('\n');
    const std::string value = rest.substr(field.size() + 3, end - field.size() - 3);
    const Status status = set_router_field(field, value, &read);
    if (!status.ok() && value != "unset") return status.to_string();
    rest.erase(0, end + 1);
  }
  return to_string(read) == to_string(spec) ? "" : "an accepted spec reads back as another";
}

std::string check(std::string_view input) {
  return within(kBound, input.size(), [&]() -> std::string {
    const Result<RouterFile> file = parse_router_file(input);
    if (!file) {
      return refusal_problem(file.error(), {StatusCode::kCorruptData, StatusCode::kInvalidArgument,
                                            StatusCode::kNotFound});
    }
    if (const Status valid = validate(file->spec); !valid.ok()) {
      std::string problem = refusal_problem(valid, {StatusCode::kInvalidArgument});
      if (!problem.empty()) return problem;
    }
    return check_fields(file->spec);
  });
}

const std::vector<std::string_view>& words() {
  static const std::vector<std::string_view> all = [] {
    std::vector<std::string_view> list = {"preset",    "family",  "yes", "no",
                                          "softmax",   "sigmoid", "max", "sum_of_best_two",
                                          "reference", "uniform"};
    for (const std::string& name : router_field_names()) list.push_back(name);
    for (const std::string& name : router_preset_names()) list.push_back(name);
    return list;
  }();
  return all;
}

std::string mutate(std::string_view input, Random& random, ByteMutator bytes) {
  return mutate_json(input, words(), random, bytes);
}

std::map<std::string, std::string> seeds() {
  return {
      {"empty", "{}"},
      {"preset", R"({"preset":"deepseek_v3","num_experts":16,"top_k":4,"num_groups":4,)"
                 R"("keep_groups":2,"routed_scaling_factor":2.5,"family":"deepseek_v3"})"},
      {"by_hand", R"({"num_experts":8,"top_k":2,"score_function":"softmax","selection_bias":false,)"
                  R"("normalise":"yes","normalise_single":true,"weight_norm":"reference",)"
                  R"("group_score":"max","on_nonfinite":"uniform"})"},
      {"unknown_field", R"({"topk":2})"},
      {"unknown_preset", R"({"preset":"mixtrall"})"},
      {"wrong_type", R"({"top_k":"2"})"},
      {"fraction", R"({"top_k":2.0})"},
      {"large_factor", R"({"routed_scaling_factor":1e39})"},
      {"control_in_value", "{\"normalise\":\"\\u001b[2J\"}"},
      {"no_object", "[1]"},
  };
}

}  // namespace

const FuzzTarget& router_file_target() {
  static const FuzzTarget target = {"router_file", check, mutate, seeds, large_json};
  return target;
}

}  // namespace argosy::testing
