// See check.h. Test: tests/cli/compare_test.cc.
#include "tools/check.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "argosy/bfloat16.h"

#include "tools/option_checks.h"
#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

// A gap that fp32 logits cannot resolve: a chain of H products errs by about H * 2^-24 of its
// terms.
double tie_gap(int64_t hidden) { return std::max(1e-6, static_cast<double>(hidden) * 0x1p-24); }

// Dot products flush denormals: of an output that small no bit need be right. Far above the
// smallest normal number, so that a sum of flushed products stays inside the tolerance too.
constexpr double kSmallestPeak = 0x1p-100;

// The token's row as the routed experts get it; empty where it travels as it is.
std::vector<double> routed_values(const ConstTensorView& hidden, const PayloadLayout& payload,
                                  int64_t token) {
  if (!payload.is_quantised()) return {};
  std::vector<uint32_t> encoded(static_cast<size_t>(payload.num_bytes + 3) / 4);
  std::vector<BFloat16> row(static_cast<size_t>(payload.hidden));
  auto* const bytes = reinterpret_cast<std::byte*>(encoded.data());
  encode_payload(payload, hidden.row(token), bytes);
  decode_payload(payload, bytes, reinterpret_cast<std::byte*>(row.data()));
  std::vector<double> values;
  for (const BFloat16 value : row) values.push_back(static_cast<double>(value.to_float()));
  return values;
}

bool same_set(std::vector<int32_t> a, std::vector<int32_t> b) {
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  return a == b;
}

}  // namespace

void PeakError::add(double value, double expected) {
  const double distance = std::abs(value - expected);
  max_abs =
      std::isnan(distance) ? std::numeric_limits<double>::infinity() : std::max(max_abs, distance);
  add_to_peak(expected);
}

void PeakError::add_to_peak(double expected) { peak = std::max(peak, std::abs(expected)); }

double PeakError::relative() const {
  return std::isfinite(max_abs) ? max_abs / std::max(peak, kSmallestPeak) : max_abs;
}

std::vector<int64_t> tokens_to_check(std::string_view count, int64_t num_tokens) {
  if (count == "none") return {};
  const int64_t wanted = count == "all" ? num_tokens : parse_whole_number(count).value_or(0);
  const int64_t number = std::min(wanted, num_tokens);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < number; ++i) {
    // Ends included, so that the last token of the last rank is always among them.
    tokens.push_back(number == 1 ? 0 : i * (num_tokens - 1) / (number - 1));
  }
  return tokens;
}

CheckResult check_tokens(const ReferenceLayer& reference, const std::vector<int64_t>& tokens,
                         const ConstTensorView& hidden, const PayloadLayout& payload,
                         bool weights_inside, const ConstTensorView& topk_idx,
                         const ConstTensorView& output, Progress& progress) {
  progress.begin("check", static_cast<int64_t>(tokens.size()));
  const int64_t width = hidden.dim(1);
  const int64_t top_k = topk_idx.dim(1);
  CheckResult result;
  for (const int64_t token : tokens) {
    const std::vector<double> x = values_of(hidden, token * width, width);
    const int32_t* const row = topk_idx.as<int32_t>() + token * top_k;
    const std::vector<int32_t> used(row, row + top_k);
    const std::vector<double> routed = routed_values(hidden, payload, token);
    ReferenceToken expected = reference.run(x, {}, routed, weights_inside);
    if (!same_set(expected.experts, used)) {
      if (expected.selection_gap < tie_gap(width)) {
        ++result.ties;
        expected = reference.run(x, used, routed, weights_inside);
      } else {
        ++result.experts_differ;
        if (result.first_differing_token < 0) result.first_differing_token = token;
      }
    }
    const std::vector<double> seen = values_of(output, token * width, width);
    for (size_t i = 0; i < seen.size(); ++i) result.error.add(seen[i], expected.output[i]);
    ++result.tokens;
    progress.step();
  }
  return result;
}

NonfiniteRows nonfinite_rows_of(const ConstTensorView& output) {
  NonfiniteRows rows;
  for (int64_t token = 0; token < output.dim(0); ++token) {
    const std::vector<double> row = values_of(output, token * output.dim(1), output.dim(1));
    if (std::all_of(row.begin(), row.end(), [](double v) { return std::isfinite(v); })) continue;
    if (rows.count++ == 0) rows.first = token;
  }
  return rows;
}

}  // namespace argosy::tools
