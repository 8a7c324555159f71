// RouterSpec field by field, from text: the printed form is read back, and nothing else is.
#include <gtest/gtest.h>

#include <algorithm>

#include "argosy/router_file.h"

namespace argosy {
namespace {

// Every line of to_string() sets the field it prints.
TEST(RouterFields, ThePrintedFormIsReadBack) {
  for (const std::string& preset : router_preset_names()) {
    RouterSpec spec = *router_preset(preset, 16, 4);
    spec.num_groups = 4;
    spec.keep_groups = 2;
    spec.routed_scaling_factor = 0.1f;
    spec.weight_norm = WeightNorm::kReference;
    spec.on_nonfinite = OnNonfinite::kUniform;
    if (spec.group_score == GroupScore::kUnset) spec.group_score = GroupScore::kMax;
    RouterSpec read;
    std::string rest = to_string(spec);
    for (const std::string& field : router_field_names()) {
      ASSERT_TRUE(rest.starts_with(field + " = ")) << rest;
      const size_t value = field.size() + 3;
      const size_t end = rest.find('\n');
      const Status status = set_router_field(field, rest.substr(value, end - value), &read);
      ASSERT_TRUE(status.ok()) << status.message();
      rest.erase(0, end + 1);
    }
    EXPECT_EQ(rest, "");
    EXPECT_EQ(to_string(read), to_string(spec));
    EXPECT_EQ(read.routed_scaling_factor, spec.routed_scaling_factor);
  }
}

TEST(RouterFields, OtherTextIsNamedAndChangesNothing) {
  for (const std::string& field : router_field_names()) {
    for (const char* const value :
         {"", "unset", "4x", " 4", "nan", "1e99", "9223372036854775808"}) {
      // Fits fp32.
      if (field == "routed_scaling_factor" && value[0] == '9') continue;
      RouterSpec spec = *router_preset("deepseek_v3", 16, 4);
      const std::string before = to_string(spec);
      const Status status = set_router_field(field, value, &spec);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << field << " " << value;
      EXPECT_NE(status.message().find(field + " is " + value), std::string::npos)
          << status.message();
      EXPECT_EQ(to_string(spec), before);
    }
  }
  RouterSpec spec;
  const Status status = set_router_field("topk", "4", &spec);
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("topk"), std::string::npos);
  EXPECT_NE(status.message().find("top_k"), std::string::npos);
}

}  // namespace
}  // namespace argosy
