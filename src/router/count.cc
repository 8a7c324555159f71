// count_topk(): the check of a routing given from outside, and its counts. Test:
// tests/router/count_test.cc.
#include <limits>
#include <stdexcept>

#include "argosy/router.h"
#include "base/error.h"

namespace argosy {
namespace {

using base::invalid;

// Counts one row. While the row is read, the count of an expert it names stands complemented, hence
// negative: a second mention shows without memory for it.
Status count_row(const int32_t* row, int64_t top_k, int64_t token, std::vector<int64_t>* counts) {
  const auto num_experts = static_cast<int64_t>(counts->size());
  for (int64_t k = 0; k < top_k; ++k) {
    const int64_t expert = row[k];
    if (expert == -1) continue;
    if (expert < 0 || expert >= num_experts) {
      return invalid("topk_idx[{}, {}] is {}, expected -1 or 0 to {}", token, k, expert,
                     num_experts - 1);
    }
    int64_t& count = (*counts)[static_cast<size_t>(expert)];
    if (count < 0) {
      return invalid("topk_idx[{}, {}] names expert {} a second time in the row of token {}", token,
                     k, expert, token);
    }
    count = ~count;
  }
  for (int64_t k = 0; k < top_k; ++k) {
    if (row[k] == -1) continue;
    int64_t& count = (*counts)[static_cast<size_t>(row[k])];
    count = ~count + 1;
  }
  return {};
}

}  // namespace

Status count_topk(const ConstTensorView& topk_idx, int64_t num_experts,
                  std::vector<int64_t>* counts) {
  constexpr int64_t kMaxExperts = std::numeric_limits<int32_t>::max();
  if (counts == nullptr) return invalid("counts is null");
  counts->clear();
  if (num_experts < 1 || num_experts > kMaxExperts) {
    return invalid("num_experts is {}, expected 1 to {}", num_experts, kMaxExperts);
  }
  if (topk_idx.dtype != DType::kI32) {
    return invalid("topk_idx is {}, expected dtype I32", describe(topk_idx));
  }
  if (topk_idx.num_dims != 2 || topk_idx.dim(0) < 0 || topk_idx.dim(1) < 0 ||
      !topk_idx.is_dense() || (topk_idx.num_elements() > 0 && topk_idx.data == nullptr)) {
    return invalid("topk_idx is {}, expected dense [tokens, top_k]", describe(topk_idx));
  }
  try {
    counts->assign(static_cast<size_t>(num_experts), 0);
  } catch (const std::exception&) {  // bad_alloc or length_error
    return base::error(StatusCode::kOutOfMemory, "no memory for the counts of {} experts",
                       num_experts);
  }
  const int64_t top_k = topk_idx.dim(1);
  for (int64_t token = 0; token < topk_idx.dim(0); ++token) {
    Status status = count_row(topk_idx.as<int32_t>() + token * top_k, top_k, token, counts);
    if (!status.ok()) {
      counts->clear();
      return status;
    }
  }
  return {};
}

}  // namespace argosy
