// The layer's output against the dense fp64 reference, on some or all tokens.
//
// A token whose experts differ from the reference's is an error unless the reference's own choice
// was within rounding of another (a tie). Ties are not skipped: their output is held against the
// reference run with the experts that were used. Test: tests/cli/compare_test.cc.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "argosy/payload.h"
#include "argosy/reference.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "tools/progress.h"

namespace argosy::tools {

// Largest distance of some values from their expected ones. A NaN anywhere counts as infinitely
// far.
struct PeakError {
  double max_abs = 0;
  double peak = 0;  // largest magnitude expected

  void add(double value, double expected);
  // Only the peak: for expected values that are not compared.
  void add_to_peak(double expected);
  // max_abs / max(peak, 2^-100).
  double relative() const;
};

// Rows of an output that hold NaN or Inf.
struct NonfiniteRows {
  int64_t count = 0;
  int64_t first = -1;  // token
};
NonfiniteRows nonfinite_rows_of(const ConstTensorView& output);

struct CheckResult {
  int64_t tokens = 0;
  int64_t ties = 0;            // experts differ, within rounding
  int64_t experts_differ = 0;  // experts differ otherwise
  int64_t first_differing_token = -1;
  PeakError error;
};

// Token indices to check: "all", "none" or a number, evenly spread over [0, num_tokens).
// Precondition: `count` passed check_count().
std::vector<int64_t> tokens_to_check(std::string_view count, int64_t num_tokens);

// hidden, output: [T, H]; topk_idx: int32 [T, K]; all dense.
CheckResult check_tokens(const ReferenceLayer& reference, const std::vector<int64_t>& tokens,
                         const ConstTensorView& hidden, const PayloadLayout& payload,
                         bool weights_inside, const ConstTensorView& topk_idx,
                         const ConstTensorView& output, Progress& progress);

}  // namespace argosy::tools
